"""What a ``Trainer`` of Lightning does for ranks: it runs the hooks of a module and of its callbacks on all of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from itertools import product

from ddpdoctor.files import regex
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.attributes import base_names, bound_to, class_attribute
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    ALL_RANKS,
    MEMBERS,
    NONE,
    OPEN_ARGUMENTS,
    RANKS,
    SYNCHRONISED,
    TRUE,
    UNIFORM,
    Arguments,
    BoundMethod,
    Const,
    DictValue,
    ExternalObject,
    Function,
    Instance,
    OneOf,
    PerRank,
    SequenceValue,
    Unknown,
    Value,
    constant,
    options_of,
    tags_of,
)
from ddpdoctor.source.libraries.rank_attributes import TRAINERS, attribute
from ddpdoctor.source.ranks.rank_local_values import own_iterable
from ddpdoctor.source.script.launch_facts import offered
from ddpdoctor.source.script.script import is_started_on_several
from ddpdoctor.source.torch_model.ddp import UNKNOWN_OPTIONS

# What comes from the batches of a rank; Lightning gives every loader a sampler for its ranks.
_FROM_BATCH = Unknown(varying=True, tags=frozenset({("batch", 0)}))
# The words in the names of the hooks that a method of the Trainer runs.
_STAGES: Mapping[str, tuple[str, ...]] = {
    "fit": ("fit", "train", "validation"),
    "validate": ("validate", "validation"),
    "test": ("test",),
    "predict": ("predict",),
}
MODULES = frozenset(f"{package}.LightningModule" for package in ("lightning", "lightning.pytorch", "pytorch_lightning"))
# Options of a Trainer that say how several ranks work together, the older ones last.
_STRATEGIES = ("strategy", "accelerator", "distributed_backend")
# In the names of strategies that do not run the script on each rank.
_OF_ONE_PROCESS = regex(r"spawn|notebook|fork|^dp$")
# Options of a Trainer that leave the division of the data to the script, of Lightning 2 and of those before.
_DIVIDES = ("use_distributed_sampler", "replace_sampler_ddp")
# What the loaders of a stage are called, where it is not the stage's own name.
_LOADED: Mapping[str, str] = {"validation": "val", "validate": "val"}
# Hooks in which `self.log` reports, and reduces, at once.
_IN_STEP = regex(r"(^|\.)(training_step|on_train_batch_\w+|on_before_\w+|on_after_backward)$")
_ON_MODULE = frozenset({"log", "log_dict", "all_gather", "manual_backward"})
_HOOKS_BEFORE_2 = frozenset({"training_epoch_end", "validation_epoch_end", "test_epoch_end"})
_ON_TRAINER = frozenset({*_STAGES, "save_checkpoint"})
_ON_STRATEGY = frozenset({"barrier", "broadcast", "reduce", "all_reduce", "all_gather", "reduce_boolean_decision"})
METHODS = _ON_MODULE | _ON_TRAINER | _ON_STRATEGY
"""Names of the methods that are modelled here."""
LOG = "LightningModule.log"
"""Name of the event of a value that is logged; its argument is the value, the ``name`` beside it where it has one."""
LOG_OF_FIRST = "LightningModule.log(rank_zero_only=True)"
"""Name of the event of one that rank 0 alone logs."""
OF_ALL_RANKS = "(sync_dist=True)"
"""Ends the name of the event of a value that is logged for all ranks."""


def method(machine: Machine, node: ast.AST, receiver: Value, name: str, given: Arguments) -> Value | None:
    """Do a method of a Trainer, of its strategy or of a module, and return its result; None for one like any other."""
    if name not in METHODS:
        return None
    if isinstance(receiver, Instance):
        return _of_module(machine, node, receiver, name, given)
    if isinstance(receiver, ExternalObject) and receiver.name in TRAINERS and name in _ON_TRAINER:
        made = machine.object(receiver)
        if has_ranks(machine, made) and not (name == "save_checkpoint" and _is_older_than_2(machine, made)):
            machine.emit("collective", f"Trainer.{name}", node, given, receiver=receiver, in_tree=True)
            if name in _STAGES:
                _run_hooks(machine, node, receiver, name, given)
        return None
    if isinstance(receiver, BoundMethod) and receiver.name in {"strategy", "training_type_plugin"}:
        trainer = receiver.receiver
        made = machine.object(trainer) if isinstance(trainer, ExternalObject) and trainer.name in TRAINERS else None
        if name in _ON_STRATEGY and has_ranks(machine, made):
            machine.emit("collective", f"strategy.{name}", node, given, in_tree=True)
            return SYNCHRONISED
    return None


def _is_older_than_2(machine: Machine, trainer: Event | None) -> bool:
    """Return whether the script is of a Lightning before 2, in which the first rank could save a checkpoint alone.

    Lightning 2 takes no ``gpus``, and refuses modules with one of the hooks that were given all outputs of an epoch.
    """
    return (trainer is not None and "gpus" in trainer.named) or any(
        isinstance(node, ast.FunctionDef) and node.name in _HOOKS_BEFORE_2
        for module in machine.script.modules
        for cls in module.index.of(ast.ClassDef)
        for node in cls.body
    )


def has_ranks(machine: Machine, trainer: Event | None) -> bool:
    """Return whether a Trainer may have several ranks that all run the script: it is not set to use one device."""
    if trainer is None:
        return False
    strategy = constant(trainer.named.get("strategy", NONE))
    if isinstance(strategy, str) and (_OF_ONE_PROCESS.search(strategy) or re.search("single", strategy)):
        return False
    return set(_counts(machine, trainer)) != {1}


def has_several(machine: Machine, trainer: Event) -> bool:
    """Return whether a Trainer is set to use several ranks, be it where a setting asks for more than one device.

    Of an option of the command line, by what it offers or by its default; of no setting, by the launcher of a file.
    """
    if not has_ranks(machine, trainer):
        return False
    names = [name for key in _STRATEGIES for name in _offered(machine, trainer.named.get(key, NONE))]
    by_strategy = any(
        isinstance(name, str) and re.search(r"ddp|fsdp|deepspeed", name, re.I) and not _OF_ONE_PROCESS.search(name)
        for name in names
    )
    all_devices = ("device-count", 0) in tags_of(trainer.named.get("devices", NONE))
    counts = set(_counts(machine, trainer))
    started = counts == {None} and is_started_on_several(machine.script)
    return by_strategy or all_devices or started or bool(counts - {None, 1})


def _offered(machine: Machine, value: Value) -> Iterator[object]:
    """Yield what a setting may be: constants, and names of objects; those that an option offers, or its default."""
    for option in options_of(value):
        holder = option.receiver if isinstance(option, BoundMethod) else None
        if (
            isinstance(option, BoundMethod)
            and isinstance(holder, ExternalObject)
            and holder.name == "argparse.Namespace"
        ):
            yield from offered(machine.script.modules, option.name)
        else:
            yield option.name if isinstance(option, ExternalObject) else constant(option)


def searches_unused(machine: Machine, trainer: Event) -> bool:
    """Return whether the strategy of a Trainer with several ranks may do without gradients of some parameters."""
    options = options_of_ddp(machine, trainer.named.get("strategy", NONE))
    told = (
        constant(options[name]) is not False for name in ("find_unused_parameters", "static_graph") if name in options
    )
    return any(told) or _is_older_than_2(machine, trainer)  # Lightning 1 searches unless it is told not to.


def options_of_ddp(machine: Machine, strategy: Value) -> Mapping[str, Value]:
    """Return what a strategy hands on to DDP: by its name or by its object; every option where that is not known."""
    name = strategy.name.rpartition(".")[2] if isinstance(strategy, ExternalObject) else constant(strategy)
    made = machine.object(strategy)
    if made is not None and made.complete and name == "DDPStrategy":
        return made.named
    if name in (None, "ddp", "auto", "ddp_find_unused_parameters_false"):
        return {}
    return {"find_unused_parameters": TRUE} if name == "ddp_find_unused_parameters_true" else UNKNOWN_OPTIONS


def _counts(machine: Machine, trainer: Event) -> Iterator[int | None]:
    """Yield how many ranks a Trainer may be set to use: -1 for all that there are, None where it is not known."""
    given = trainer.named.get("devices", trainer.named.get("gpus", NONE))
    several = [len(given.values)] if isinstance(given, SequenceValue) and not given.open else _offered(machine, given)
    for nodes, devices in product(_offered(machine, trainer.named.get("num_nodes", Const(1))), several):
        if isinstance(devices, str):
            devices = int(devices) if devices.lstrip("-").isdigit() else -1 if devices == "auto" else None
        if not isinstance(devices, int) or not isinstance(nodes, int):
            yield None
        else:
            yield devices if devices < 0 else devices * nodes


def _of_module(machine: Machine, node: ast.AST, module: Instance, name: str, given: Arguments) -> Value | None:
    if name not in _ON_MODULE or not isinstance(machine.store.get(module.number, "trainer"), ExternalObject):
        return None
    if name in {"all_gather", "manual_backward"}:
        machine.emit("collective", name, node, given, in_tree=True)
        return SYNCHRONISED if name == "all_gather" else NONE
    synchronises = constant(given.named.get("sync_dist", Const(False)))
    value = given.positional[-1] if given.positional else given.named.get("value", given.named.get("dictionary", NONE))
    named = {**given.named, "name": given.positional[0]} if len(given.positional) > 1 else given.named
    of_first = constant(given.named.get("rank_zero_only", Const(False)))
    if of_first is True or (of_first is synchronises is False):
        machine.note("call", LOG_OF_FIRST if of_first else LOG, node, Arguments((value,), named), receiver=module)
    elif of_first is False and synchronises is True and isinstance(node, ast.Call):
        _log_of_all(machine, node, name, value, given)
    return NONE


def names_logged(event: Event) -> set[object]:
    """Return the names under which values are logged, as far as they are known."""
    named, [value] = event.named.get("name"), event.positional
    return {key for key, _ in value.entries} if isinstance(value, DictValue) else {constant(named or NONE)}


def keys_logged(call: ast.Call) -> list[ast.expr]:
    """Return the expressions by which a call names what it logs, where they are written in it."""
    given = [*call.args[:1], *(word.value for word in call.keywords if word.arg in ("name", "dictionary"))]
    return [key for one in given for key in (one.keys if isinstance(one, ast.Dict) else [one]) if key is not None]


def _log_of_all(machine: Machine, node: ast.Call, name: str, value: Value, given: Arguments) -> None:
    """Reduce what is logged, a dict once for each of its keys.

    What is reduced at the end of the epoch counts where it shows in which keys the ranks differ, or that some log none.
    """
    logged = [*node.args[:1], *(word.value for word in node.keywords if word.arg == "dictionary")]
    keys = own_iterable(machine, logged[0], value) if logged and name == "log_dict" else None
    by_key = keys is not None or any(MEMBERS in tags_of(loop.around.iterable) for loop in machine.loops)
    by_key = by_key or any(not isinstance(key, ast.Constant) for key in keys_logged(node))
    if not by_key and not _at_once(machine, given.named) and machine.mask == ALL_RANKS & ~machine.gone:
        return

    def reduce() -> None:
        machine.emit("collective", f"self.{name}{OF_ALL_RANKS}", node, given, in_tree=True)

    if keys is None:
        reduce()
    else:
        machine.add_loop(machine.collect(reduce), [None] * len(RANKS), keys.node, keys)


def _at_once(machine: Machine, named: Mapping[str, Value]) -> bool:
    """Return whether ``self.log`` reduces at the call, not at the end of the epoch."""
    said = constant(named.get("on_step", NONE))
    if isinstance(said, bool):
        return said
    return any(_IN_STEP.search(frame.function) for frame in machine.frames)


def _run_hooks(machine: Machine, node: ast.AST, trainer: ExternalObject, name: str, given: Arguments) -> None:
    made = machine.object(trainer)
    model = given.value("model", 0) or NONE
    module = next((one for one in options_of(model) if isinstance(one, Instance)), None)
    if made is None or module is None or isinstance(model, (OneOf, PerRank)):
        return
    if not any(name.endswith(".LightningModule") for name in base_names(machine, module.cls)):
        return
    held = made.named.get("callbacks", NONE)
    listed = held.values if isinstance(held, SequenceValue) else (held,)
    callbacks = [one for one in listed if isinstance(one, Instance)]
    for key in ("global_rank", "local_rank"):
        machine.assign(module.number, key, attribute(trainer, key) or UNIFORM)
    machine.assign(module.number, "trainer", trainer)
    _ask_for_data(machine, node, made, module, [*given.positional[1:], *given.named.values()], _STAGES[name])
    for hook, arguments in _hooks(_STAGES[name]):
        for instance in (module, *callbacks):
            found = class_attribute(machine, instance.cls, hook)
            if isinstance(found, Function):
                before: list[Value] = [] if instance is module else [trainer, module]
                passed = Arguments([*before, *arguments], complete=False)
                machine.apply(node, bound_to(found, instance), passed)


def _ask_for_data(
    machine: Machine, node: ast.AST, trainer: Event, module: Instance, given: list[Value], stages: tuple[str, ...]
) -> None:
    """Run on every rank what makes the loaders, of the module or of a module of data; the Trainer divides them."""
    divides = all(constant(trainer.named.get(option, NONE)) is not False for option in _DIVIDES)
    modules = [one for one in given if isinstance(one, Instance) and one != module]
    for instance in (*modules, module):
        _prepare_data(machine, node, instance)
    for instance in (*modules, module):
        for hook in ("setup", *(f"{_LOADED.get(stage, stage)}_dataloader" for stage in stages)):
            found = class_attribute(machine, instance.cls, hook)
            if not isinstance(found, Function) or (hook == "setup" and instance == module):
                continue
            arguments: list[Value] = [UNIFORM] if hook == "setup" else []
            made = machine.apply(node, bound_to(found, instance), Arguments(arguments, complete=False))
            if divides:
                machine.prepared.update(one.number for one in options_of(made) if isinstance(one, ExternalObject))


def _prepare_data(machine: Machine, node: ast.AST, instance: Instance) -> None:
    """Run on the first rank alone what Lightning runs once a node, before any rank's ``setup``.

    That the nodes do it side by side is the framework's way and no fault of the script.
    """
    found, present = class_attribute(machine, instance.cls, "prepare_data"), machine.mask
    if not isinstance(found, Function) or not present & 1:
        return
    machine.mask = present & 1
    try:
        machine.apply(node, bound_to(found, instance), OPEN_ARGUMENTS)
    finally:
        machine.mask = present & ~machine.gone


def _hooks(stages: tuple[str, ...]) -> Iterator[tuple[str, list[Value]]]:
    """Yield the hooks of some stages that every rank runs, in their order, with what they are given."""
    yield "setup", [UNIFORM]
    yield "configure_optimizers", []
    for stage in stages:
        yield f"on_{stage}_start", []
        yield f"on_{stage}_epoch_start", []
        yield f"on_{stage}_batch_start", [_FROM_BATCH, UNIFORM, UNIFORM]
        yield f"{'training' if stage == 'train' else stage}_step", [_FROM_BATCH, UNIFORM, UNIFORM]
        yield f"on_{stage}_batch_end", [_FROM_BATCH, _FROM_BATCH, UNIFORM, UNIFORM]
    for stage in reversed(stages):
        outputs = SequenceValue((_FROM_BATCH,), open=True)
        yield f"{'training' if stage == 'train' else stage}_epoch_end", [outputs]
        yield f"on_{stage}_epoch_end", []
        yield f"on_{stage}_end", []
