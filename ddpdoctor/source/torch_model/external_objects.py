"""Calls that make an object: loaders, samplers, DDP, groups and devices, ``partial``, ``super`` and ``dict``."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial

from ddpdoctor.source.events import EventKind
from ddpdoctor.source.interpreter.assignment import columns_of, item_at, item_of, known_items
from ddpdoctor.source.interpreter.attributes import (
    attribute_of,
    base_names,
    bases_of,
    bound_to,
    class_attribute,
    guess_from_name,
    items_of,
    lacks,
    makers_of,
    named_member,
    one_class_of,
    promised_by_name,
)
from ddpdoctor.source.interpreter.operators import TURNS, TURNS_OF_ALL, TURNS_OF_SHARE
from ddpdoctor.source.interpreter.scopes import Cell
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    NONE,
    OPAQUE,
    OWN_LENGTH,
    OWN_ROWS,
    RANKS,
    SYNCHRONISED,
    UNIFORM,
    Arguments,
    BoundMethod,
    Const,
    DictValue,
    External,
    ExternalObject,
    Function,
    Instance,
    OneOf,
    Partial,
    PerRank,
    ProjectClass,
    ProjectModule,
    SequenceValue,
    Sharded,
    Tag,
    TensorSize,
    Unknown,
    Value,
    by_rank,
    constant,
    derived,
    is_varying,
    never_none,
    on_rank,
    only_of_files,
    options_of,
    per_rank,
    tagged,
    tags_of,
)
from ddpdoctor.source.ranks.data_partitions import SHARE
from ddpdoctor.source.ranks.random_numbers import OWN
from ddpdoctor.source.ranks.rank_local_values import (
    COUNTED,
    LISTED,
    LISTING,
    OWN_KINDS,
    POLLED,
    UNREAD_ITEM,
    agrees_by_name,
    extent_of,
    members_of,
    origin_of,
)
from ddpdoctor.source.script.module import DEFINITIONS, Module, descend_outside, last_name
from ddpdoctor.source.script.written_paths import template_of
from ddpdoctor.source.torch_model.ddp import wrap
from ddpdoctor.source.torch_model.recorded_calls import SET_PARAM_GROUP
from ddpdoctor.source.vocabulary import (
    DATA_LOADER,
    DATA_PARALLEL,
    DDP,
    DISTRIBUTED_SAMPLER,
    ENGINE,
    MAKES_SCHEDULER,
    MODEL_LIBRARY,
    MODULE,
    NOT_FALSE,
    OPTIMIZER,
    PRETRAINED,
    RANK_VARYING_CALLS,
    SAME_ITEMS,
)

# What a script asks of the kind of an object: `isinstance(model, DDP)`, `type(model) is DDP`, `hasattr`.

_WRAPPERS = frozenset({DDP, DATA_PARALLEL})
_MODULE = "torch.nn.Module"


def is_instance(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Return what ``isinstance`` gives, where the class of the object shows it."""
    if len(given.positional) != 2:
        return derived(given.positional[:1])
    return by_rank(partial(_all_alike, machine), *given.positional)


def has_attribute(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Return what ``hasattr`` gives, where the class of the object shows it."""
    positional = given.positional
    name = constant(positional[1]) if len(positional) == 2 else None
    if not isinstance(name, str):
        return derived(positional[:1])
    if (makers := makers_of(machine, positional[0], name)) is not None:
        return per_rank([Const(bool(makers >> rank & 1)) for rank in RANKS])
    return by_rank(lambda value: _of_options(value, lambda option: _has(machine, option, name)), positional[0])


def type_of(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Return the class of an object."""
    return by_rank(_class_of, given.positional[0]) if len(given.positional) == 1 else derived(given.values)


def _class_of(value: Value) -> Value:
    if isinstance(value, ExternalObject):
        return External(value.name)
    if isinstance(value, Instance):
        return value.cls
    if isinstance(value, OneOf):
        classes = tuple(dict.fromkeys(map(_class_of, value.options)))
        return classes[0] if len(classes) == 1 else OneOf(classes, value.varying)
    return derived((value,))


def _all_alike(machine: Machine, value: Value, classes: Value) -> Value:
    wanted = classes.values if isinstance(classes, SequenceValue) and not classes.open else (classes,)
    return _of_options(value, lambda option: _any(_is_one(machine, option, cls) for cls in wanted))


def _of_options(value: Value, answer: Callable[[Value], bool | None]) -> Value:
    """Return what holds of each alternative that a value has; unknown where they differ."""
    answers = {answer(option) for option in options_of(value)}
    known = answers.pop() if len(answers) == 1 else None
    return derived((value,)) if known is None else Const(known)


def _any(answers: Iterable[bool | None]) -> bool | None:
    known = list(answers)
    return True if True in known else None if None in known else False


def _is_one(machine: Machine, option: Value, cls: Value) -> bool | None:
    if isinstance(option, Instance):
        return _derives(machine, option.cls, cls)
    if not isinstance(option, ExternalObject) or not isinstance(cls, External):
        return False if option == Const(None) and isinstance(cls, (External, ProjectClass)) else None
    if option.name == cls.name:
        return True
    if cls.name == _MODULE and (option.name in _WRAPPERS or MODULE.search(option.name)):
        return True
    # A wrapper is no other wrapper, and a plain module is none.
    plain = option.name in _WRAPPERS or MODULE.search(option.name) is not None
    return False if cls.name in _WRAPPERS and plain else None


def _derives(machine: Machine, own: ProjectClass, cls: Value) -> bool | None:
    if own == cls:
        return True
    bases = list(bases_of(machine, own))
    if cls in bases or (isinstance(cls, External) and cls.name in base_names(machine, own)):
        return True
    if isinstance(cls, ProjectClass):
        return False if all(isinstance(base, ProjectClass) for base in bases) else None
    read = all(isinstance(base, ProjectClass) or base == External(_MODULE) for base in bases)
    return False if isinstance(cls, External) and cls.name in _WRAPPERS and read else None


def _has(machine: Machine, option: Value, name: str) -> bool | None:
    if isinstance(option, ExternalObject):
        if machine.store.get(option.number, name) is not None:
            return True
        if name != "module":
            return None
        return True if option.name in _WRAPPERS else False if MODULE.search(option.name) else None
    if isinstance(option, Instance):
        if machine.store.get(option.number, name) is not None or class_attribute(machine, option.cls, name) is not None:
            return True
        plain_module = name == "module" and set(base_names(machine, option.cls)) == {_MODULE}
        return False if plain_module or lacks(machine, option, name) else None
    return False if option == Const(None) else None


def make_partial(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Return the value of ``functools.partial``."""
    if not given.positional or not given.complete:
        return OPAQUE
    return Partial(given.positional[0], tuple(given.positional[1:]), tuple(given.named.items()))


def make_super(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Return the object of the method, as one of its base classes has it."""
    owner = machine.frame.owner
    receiver = owner.receiver if owner is not None and owner.receiver is not None else OPAQUE
    return BoundMethod(receiver, "super()")


def make_dict(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Return the value of ``dict(...)``."""
    first = given.positional[0] if given.positional else DictValue(())
    keys, *values = columns_of(known_items(first)) or [()]
    if len(values) == 1 and all(isinstance(key, Const) for key in keys):
        first = DictValue(tuple((constant(key), value) for key, value in zip(keys, values[0], strict=True)))
    if not isinstance(first, DictValue) or len(given.positional) > 1 or not given.complete:
        return derived([*_values_of_pairs(given.positional), *given.named.values()])
    return DictValue(tuple((dict(first.entries) | dict(given.named)).items()))


# Stage of ZeRO from which parameters are divided, too.
_GATHERS_IN_FORWARD = 3


def make_engine(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Return what ``deepspeed.initialize`` does: the engine, and an optimizer, a loader and a scheduler."""
    rest = derived(given.values)
    data, parallel = (given.named.get(name, NONE) for name in ("training_data", "mpu"))
    if parallel != NONE or not given.complete:  # Ranks that hold parts of one model share their data.
        return SequenceValue((rest, rest, _divided_loader(machine, node, data), rest))
    engine = ExternalObject(machine.object_number(node), ENGINE)
    stage = constant(item_at(item_at(given.named.get("config", NONE), "zero_optimization"), "stage"))
    if isinstance(stage, int) and stage > 0:
        # From stage 1 on a step gathers what the ranks have updated, each its part; at stage 3 a forward gathers, too.
        machine.sharded[engine.number] = Sharded(True, stage >= _GATHERS_IN_FORWARD, True, with_data=True)
    return SequenceValue((engine, rest, _divided_loader(machine, node, data), rest))


def _divided_loader(machine: Machine, node: ast.AST, dataset: Value) -> Value:
    """Return the loader that an engine makes of a data set, which gives each rank its part; None for no data set."""
    if constant(dataset) is None:
        return NONE
    number = machine.object_number((node, "training_data"))
    machine.prepared.add(number)
    machine.emit("loader", DATA_LOADER, node, Arguments(named={"dataset": dataset}, complete=False), number=number)
    return ExternalObject(number, DATA_LOADER)


def _values_of_pairs(positional: Sequence[Value]) -> Sequence[Value]:
    """Return the values of ``dict(zip(names, values))``, which are what comes out of it."""
    first = positional[0] if len(positional) == 1 else None
    pairs = first.values if isinstance(first, SequenceValue) else ()
    if not pairs or any(not isinstance(pair, SequenceValue) or pair.open or len(pair.values) != 2 for pair in pairs):
        return positional
    return [pair.values[1] for pair in pairs if isinstance(pair, SequenceValue)]


WORLD_GROUP = External("torch.distributed.group.WORLD")


def make_group(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Return a group; all ranks take part in making it, unless it is local."""
    if constant(given.named.get("use_local_synchronization", Const(False))) is False:
        tested = any(is_varying(value) and not only_of_files(value) for value in machine.deciding)
        by_number = (tested and not machine.own_tests) or any(loop.skipped and not loop.own for loop in machine.loops)
        machine.groups.setdefault(node, (by_number, list(machine.loops)))
        machine.emit("collective", "new_group", node, given, in_tree=True)
    ranks = given.value("ranks", 0) or NONE
    return (
        WORLD_GROUP
        if given.complete and constant(ranks) is None
        else ExternalObject(machine.object_number(node), "ProcessGroup")
    )


def make_loader(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Return the loader, and note how it was made."""
    number = machine.object_number(node)
    machine.emit("loader", DATA_LOADER, node, given, number=number)
    for name, position in (("sampler", 3), ("batch_sampler", 4)):
        for own in (one for one in options_of(given.value(name, position) or NONE) if isinstance(one, Instance)):
            method = class_attribute(machine, own.cls, "__iter__")
            if isinstance(method, Function) and method.node not in machine.visited:  # Its order, as the loader asks.
                machine.call_function(node, bound_to(method, own))
    return ExternalObject(number, DATA_LOADER)


def make_sampler(machine: Machine, node: ast.AST, given: Arguments, *, number: int = 0) -> Value:
    """Return the sampler, and note how it was made; ``number`` is that of an object of a class derived from it."""
    number = number or machine.object_number(node)
    machine.emit("sampler", DISTRIBUTED_SAMPLER, node, given, number=number)
    return ExternalObject(number, DISTRIBUTED_SAMPLER)


def make_ddp(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Return the module as DDP wraps it, with the devices that it is given."""
    devices = given.value("device_ids", 1) or NONE
    if constant(devices) is not None:
        note_device(machine, node, "device_ids", Arguments((devices,)))
    return wrap(machine, node, given)


def set_device(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Note the device that a rank chooses for itself."""
    note_device(machine, node, "set_device", given)
    return NONE


def make_device(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Return a device, and note its index."""
    positional = given.positional
    if len(positional) > 1 and constant(positional[0]) == "cuda":
        note_device(machine, node, "device", Arguments(positional[1:2]))
        return by_rank(
            lambda index: Const(f"cuda:{index.value}") if isinstance(index, Const) else derived((index,)), positional[1]
        )
    return positional[0] if len(positional) == 1 else derived(positional)


def note_device(machine: Machine, node: ast.AST, name: str, given: Arguments, receiver: Value | None = None) -> None:
    """Note what a rank gives as its device, and what it moves there."""
    value = given.positional[0] if given.positional else given.named.get("device")
    if value is not None:
        machine.emit("device", name, node, Arguments((value,)), receiver=receiver)


# What makes the process group, itself or in a framework.
STARTS = frozenset({
    "torch.distributed.init_process_group", "deepspeed.init_distributed", "deepspeed.initialize",
    "accelerate.Accelerator",
})  # fmt: skip
_STARTING = frozenset(name.rpartition(".")[2] for name in STARTS)
GROUP: Cell = (-1, "process group")
"""Where the store has that the process group was made: not by an arm that has been left for good."""
Handler = Callable[[Machine, ast.AST, Arguments], Value]
"""Makes a call: where it stands, and what it is given."""
_MAKERS = frozenset({"from_pretrained", "from_config"})
_OPENING = frozenset({"builtins.open", "io.open", "codecs.open", "gzip.open", "bz2.open", "lzma.open"})
# Kinds of the tags of what names of files are made of.
_OF_NAMES = frozenset({"clock", "random", "drawn"})
SHARDED_PARAMETERS = "sharded-parameters"
"""Kind of the tags of the parameters of a model that is certainly sharded, a part on each rank."""
_NUMBERS = frozenset({"world-size", "local-world-size", "device-count", "task-count"})
# Generators of random numbers that may be given a seed.
_GENERATORS = frozenset({"random.Random", "numpy.random.RandomState", "numpy.random.default_rng"})
TensorFactory = Callable[[Arguments], Value]


def plain_handler_of(name: str) -> Handler:
    """Return the handler of a call that runs nothing of interest."""
    last = name.rpartition(".")[2]
    if name == "torch.distributed.is_initialized":
        return _is_initialized
    if name in NOT_FALSE:
        return lambda machine, node, given: Const(True)
    if last in SAME_ITEMS:
        return _zipped if last == "zip" else partial(_same_items, last)
    factory = TENSOR_CALLS.get(name)
    if factory is not None:
        return lambda machine, node, given: factory(given)
    if name in _OPENING:
        return _opened
    if LISTING.match(name):
        return _listed
    if name in _GENERATORS:
        return _generator
    if RANK_VARYING_CALLS.match(name):
        varying = Unknown(True, False, origin_of(name))
        return lambda machine, node, given: varying
    if name == "apex.amp.initialize":
        return _initialized_by_apex
    if last == "_get_default_store":
        return partial(_object, "torch.distributed.Store")
    if name == "str.format" or name.startswith(("os.path.", "pathlib.", "torch.distributions.")):
        return lambda machine, node, given: derived(given.values)
    if name.startswith("torch.distributed.") and last[:1].islower():
        return _uncounted
    if name.startswith("torch.") and last[:1].islower():
        return partial(_of_torch, name)
    if MAKES_SCHEDULER.match(name):
        return partial(_object, "torch.optim.lr_scheduler.LambdaLR")
    if name in _BY_FUNCTION:
        return partial(_schedule, name)
    owner = name.removesuffix(f".{last}")
    if last in _MAKERS and PRETRAINED.match(owner):
        return partial(_object, owner)
    if last[:1].isupper() or name.startswith(MODEL_LIBRARY):
        return partial(_object, name)
    return partial(_unread, name)


# Schedules of which a function of the script gives the rate.
_BY_FUNCTION = frozenset({"torch.optim.lr_scheduler.LambdaLR", "torch.optim.lr_scheduler.MultiplicativeLR"})


def _schedule(name: str, machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Return a schedule; a rate that is each rank's own is a setting of the optimizer's that it sets by itself."""
    made = _object(name, machine, node, given)
    moved = [one for one in options_of(given.value("optimizer", 0) or NONE) if isinstance(one, ExternalObject)]
    functions = given.value("lr_lambda", 1) or NONE
    for function in functions.values if isinstance(functions, SequenceValue) else options_of(functions):
        called = isinstance(function, (Function, Partial))
        rate = machine.apply(node, function, Arguments((UNIFORM,))) if called else NONE
        if is_varying(rate):
            groups = Unknown(tags=frozenset(("param-groups", one.number) for one in moved))
            machine.note("training", SET_PARAM_GROUP, node, Arguments((Const("lr"), rate)), receiver=groups)
    return made


def _generator(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Return a generator, which draws alike where its seed is alike; without a seed each process draws its own."""
    seeds = [value for value in given.values if value != NONE]
    return derived(seeds) if seeds else Unknown(True, False, frozenset({("random", OWN)}))


def _listed(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Return names in a directory, which a ``while`` that lists them again and again waits for."""
    polls = any(isinstance(loop.around.node, ast.While) for loop in machine.loops)
    return Unknown(True, False, frozenset({POLLED if polls else LISTED}))


def _opened(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Return a file, whose content does not come from the time or the random number that its name is made of."""
    result = derived(given.values)
    kept = origins_kept(result) | (result.tags & {SHARE})
    return Unknown(result.varying, False, frozenset(tag for tag in kept if tag[0] not in _OF_NAMES))


def _is_initialized(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Return whether there is a group, in a script that certainly makes it, or in code that does if there is none.

    Elsewhere a false answer would be a guess: a framework, or a call that was not followed, may have made it.
    """
    is_made = machine.store.get(*GROUP) is not None
    owner = machine.frame.owner
    module = machine.frame.module
    if is_made or machine.group_is_made_here or _names_a_start(module, module.tree if owner is None else owner.node):
        return Const(is_made)
    machine.asked_early = True
    return Const(True)


def _initialized_by_apex(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Return the models that it is given, and the optimizers where there are any: it changes them and returns them."""
    models, optimizers = given.value("models", 0), given.value("optimizers", 1)
    if models is None:
        return derived(given.positional)
    return models if optimizers in (None, NONE) else SequenceValue((models, optimizers))


@lru_cache(maxsize=4096)
def _names_a_start(module: Module, scope: ast.AST) -> bool:
    """Return whether the code of a function, or of a module outside of its definitions, starts the process group."""
    named = ((last_name(node), node) for node in descend_outside(scope, DEFINITIONS))
    return any(
        name in _STARTING and (name == "init_process_group" or module.resolve(node) in STARTS) for name, node in named
    )


def _of_torch(name: str, machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Return the result of a function of torch, with its length where the rank's own data makes that."""
    result = members_of(name, derived(given.values))
    made = node.args[0] if isinstance(node, ast.Call) and node.args else None
    if name not in _JOINING or made is None or isinstance(made, (ast.List, ast.Tuple)):
        return result  # Of a list that is written out one item may pad the others.
    return tagged(result, frozenset({OWN_LENGTH})) if OWN_ROWS in tags_of(given.positional[0]) else result


# Functions that make a tensor of the items of a list.
_JOINING = frozenset({"torch.tensor", "torch.as_tensor", "torch.cat", "torch.concat", "torch.stack"})


def _uncounted(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Return a mesh or a store: made of numbers of ranks, and none itself."""
    result = derived(given.values)
    return Unknown(result.varying, result.opaque, frozenset(tag for tag in result.tags if tag[0] not in _NUMBERS))


def _object(name: str, machine: Machine, node: ast.AST, given: Arguments) -> Value:
    number = machine.object_number(node)
    sampler = "Sampler" in name.rpartition(".")[2]
    kind: EventKind = "data-parallel" if name == DATA_PARALLEL else "sampler" if sampler else "object"
    machine.emit(kind, name, node, given, number=number)
    return ExternalObject(number, name)


def _unread(name: str, machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Return the result of a function of which only the name is known."""
    last = name.rpartition(".")[2]
    if not name.startswith(_KNOWN) and name.partition(".")[0] not in _OF_PYTHON:
        machine.note_unread(node, given.values)
    promised = None if name.startswith(("builtins.", "torch.")) else promised_by_name(machine, last)
    if promised is not None:
        return promised
    if agrees_by_name(last):
        return SYNCHRONISED
    result = derived(given.values)
    return members_of(name, Unknown(result.varying, opaque=not name.startswith("builtins."), tags=origins_kept(result)))


# Beginnings of the names of what is known to train nothing and to give back no more than its arguments.
_KNOWN = ("builtins.", "torch.", "torchvision.", "torchaudio.", "numpy.")
# Python's own modules, but those that call what they are given.
_OF_PYTHON = sys.stdlib_module_names - {
    *("asyncio", "atexit", "concurrent", "contextlib", "contextvars", "ctypes", "functools", "importlib"),
    *("multiprocessing", "runpy", "sched", "signal", "subprocess", "threading", "unittest", "weakref"),
    *("bdb", "cProfile", "code", "pdb", "profile", "queue", "socketserver", "timeit", "trace"),
}


_KEPT_KINDS = frozenset({"bare", SHARDED_PARAMETERS, TURNS, TURNS_OF_ALL, TURNS_OF_SHARE})


def origins_kept(value: Unknown) -> frozenset[Tag]:
    """Return the origins of its arguments that the result of a call which cannot be read keeps."""
    if not value.tags:
        return value.tags
    return frozenset(tag for tag in value.tags if tag[0] in OWN_KINDS or tag[0] in _KEPT_KINDS)


def _is_zip(value: SequenceValue) -> bool:
    return value.open and len(value.values) == 1 and isinstance(value.values[0], SequenceValue)


def _zipped(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Return tuples for ``zip`` whose parts keep their own origins."""
    if not given.positional or any(isinstance(value, PerRank) for value in given.positional):
        return _same_items("zip", machine, node, given)
    rows = [known_items(value) for value in given.positional]
    if all(rows):
        return SequenceValue(tuple(map(SequenceValue, zip(*rows, strict=False))))
    return SequenceValue((SequenceValue(tuple(item_of(value) for value in given.positional)),), open=True)


def _same_items(last: str, machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Return the items of the arguments, as ``tqdm(loader)`` and ``enumerate(loader)`` do."""
    positional = given.positional
    if positional and isinstance(positional[0], Instance) and last == "next":
        following = class_attribute(machine, positional[0].cls, "__next__")
        if isinstance(following, Function):
            return machine.call_function(node, bound_to(following, positional[0]))
    elif len(positional) == 1 and isinstance(positional[0], Instance):
        items = items_of(machine, node, positional[0])
        if isinstance(items, SequenceValue) and last != "enumerate":
            return items
        if isinstance(items, SequenceValue):
            return SequenceValue((SequenceValue((UNIFORM, item_of(items))),), open=True)
    if len(positional) == 1 and isinstance(positional[0], PerRank) and all(map(known_items, positional[0].values)):
        return by_rank(lambda one: _same_items(last, machine, node, Arguments((one,), given.named)), positional[0])
    if len(positional) == 1 and isinstance(positional[0], SequenceValue):
        known = known_items(positional[0])
        if last in {"list", "tuple"} or (last == "tqdm" and (known or _is_zip(positional[0]))):
            return positional[0]
        if last == "reversed" and known:
            return SequenceValue(known[::-1])
        if last == "enumerate" and known and not given.named:
            return SequenceValue(tuple(SequenceValue((Const(number), item)) for number, item in enumerate(known)))
        if last == "enumerate" and _is_zip(positional[0]):
            return SequenceValue((SequenceValue((UNIFORM, positional[0].values[0])),), open=True)
    options = (option for value in positional for option in options_of(value))
    objects = (one for one in options if isinstance(one, ExternalObject))
    tags = {("loader", one.number) for one in objects if one.name == DATA_LOADER}
    if last == "enumerate":
        tags.add(COUNTED)
    if last == "iter" and not isinstance(machine.frame.module.parents.get(node), ast.Call):
        # Begun again in every turn of a loop, for its batches one by one; ``next(iter(loader))`` only looks at one.
        again = next((loop.around for loop in reversed(machine.loops) if not loop.around.once), None)
        if again is not None:
            machine.cycles.update({number: again for kind, number in tags if kind == "loader"})
    mixed = derived(positional, frozenset(tags))
    if last == "next":
        if not mixed.varying and mixed.tags <= {COUNTED}:
            return Unknown(tags=mixed.tags | {UNREAD_ITEM})
        of_loader = any(kind == "loader" for kind, _ in mixed.tags)
        batches = frozenset(("batch", n) if k == "loader" else (k, n) for k, n in mixed.tags)
        return Unknown(mixed.varying or of_loader, False, batches, of_loader and len(positional) == 1)
    return never_none(mixed)


def read_attribute(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Return what ``getattr`` gives: an attribute by a name that is known, or the default of one that is not there."""
    positional = given.positional
    if len(positional) >= 2 and isinstance(positional[1], Const) and isinstance(positional[1].value, str):
        name = positional[1].value
        if len(positional) == 3 and all(lacks(machine, owner, name) for owner in options_of(positional[0])):
            return positional[2]
        value = guess_from_name(machine, name, attribute_of(machine, positional[0], name))
        if len(positional) == 3 and (makers := makers_of(machine, positional[0], name)) is not None:
            return per_rank([on_rank(value if makers >> rank & 1 else positional[2], rank) for rank in RANKS])
        return derived((value,)) if isinstance(value, BoundMethod) else value
    if len(positional) == 2 and positional[0] == External("torch.optim") and not is_varying(positional[1]):
        return External(OPTIMIZER)
    if len(positional) >= 2 and (member := named_member(machine, node, positional[1], positional[0])) is not None:
        return member
    return derived(positional)


def read_text(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Return what ``eval`` gives of a text that names something of a module: ``"models." + name``."""
    written = node.args[0] if isinstance(node, ast.Call) and node.args else ast.Constant("")
    first, *names = template_of(machine.frame.module, written).split(".")
    owner = machine.lookup(first) if first.isidentifier() else OPAQUE
    for name in names:
        if isinstance(owner, ProjectModule) and not name.isidentifier():
            return one_class_of(machine, owner) or OPAQUE
        owner = attribute_of(machine, owner, name) if name.isidentifier() else OPAQUE
    return owner if isinstance(owner, (Function, ProjectClass)) else derived(given.positional)


# Sizes of tensors made by torch's factories from constants: elements and bytes.

DEFAULT_BYTES = 4
"""float32."""
_BYTES_OF: Mapping[str, int] = {
    "float64": 8, "double": 8, "int64": 8, "long": 8, "float32": 4, "float": 4, "int32": 4, "int": 4, "float16": 2,
    "half": 2, "bfloat16": 2, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip
_KEEPS_SIZE = frozenset({
    "view", "reshape", "unsqueeze", "squeeze", "contiguous", "clone", "detach", "transpose", "permute", "t", "triu",
    "tril", "flatten", "to", "cuda", "cpu", "requires_grad_", "normal_", "uniform_", "fill_", "mul", "div", "neg",
    "exp",
})  # fmt: skip


def _shaped(given: Arguments) -> Value:
    sizes = list(given.positional)
    if len(sizes) == 1 and isinstance(sizes[0], SequenceValue) and not sizes[0].open:
        sizes = list(sizes[0].values)
    return _sized(sizes, given)


def _sized(sizes: Sequence[Value], given: Arguments) -> Value:
    elements = 1
    for size in sizes:
        if not isinstance(size, Const) or not isinstance(size.value, int) or isinstance(size.value, bool):
            return derived(given.values)
        elements *= size.value
    return TensorSize(elements, elements * _item_bytes(given.named.get("dtype")))


def _full(given: Arguments) -> Value:
    if not given.positional or is_varying(given.value("fill_value", 1) or UNIFORM):
        return derived(given.values)
    return _shaped(Arguments(given.positional[:1], given.named))


def _arange(given: Arguments) -> Value:
    if len(given.positional) == 1:
        size = _sized(given.positional, given)
        if isinstance(size, TensorSize) and "dtype" not in given.named:
            return TensorSize(size.elements, size.elements * 8)
        return size
    return derived(given.values)


def _same_size(given: Arguments) -> Value:
    if given.positional and isinstance(given.positional[0], TensorSize):
        return given.positional[0]
    return derived(given.values)


def _as_large(given: Arguments) -> Value:
    like = given.positional[0] if given.positional else NONE
    extent = None if isinstance(like, TensorSize) else extent_of(like)
    return _same_size(given) if extent is None else derived([extent, *given.positional[1:]])


def _item_bytes(dtype: Value | None) -> int:
    if isinstance(dtype, External):
        return _BYTES_OF.get(dtype.name.rpartition(".")[2], DEFAULT_BYTES)
    return DEFAULT_BYTES


TENSOR_CALLS: Mapping[str, TensorFactory] = {
    **{f"torch.{name}": _shaped for name in ("zeros", "ones", "empty", "rand", "randn")},
    "torch.full": _full,
    "torch.arange": _arange,
    "torch.eye": lambda given: _sized((*given.positional[:1], *given.positional[-1:]) or (UNIFORM,), given),
    **{f"torch.{name}": _same_size for name in ("tril", "triu", "exp", "log", "sin", "cos")},
    **{f"torch.{name}": _as_large for name in ("zeros_like", "ones_like", "full_like", "empty_like")},
}


def tensor_method(receiver: Value, name: str, arguments: Sequence[Value]) -> Value | None:
    """Return what a method makes of a tensor of known size; None when that is not known."""
    if not isinstance(receiver, TensorSize):
        return None
    if name in _KEEPS_SIZE:
        return receiver
    if name in _BYTES_OF and not arguments:
        return TensorSize(receiver.elements, receiver.elements * _BYTES_OF[name], receiver.tags)
    return derived(arguments, tags_of(receiver))
