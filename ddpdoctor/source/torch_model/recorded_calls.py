"""Calls that change nothing which ranks have to agree on, and that checks look at all the same."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import lru_cache

from ddpdoctor.files import regex
from ddpdoctor.source.events import EventKind
from ddpdoctor.source.interpreter.attributes import base_names
from ddpdoctor.source.interpreter.scopes import ARGUMENTS
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    ALL_RANKS,
    DRAWN,
    NONE,
    OPAQUE,
    RANKS,
    Arguments,
    Const,
    External,
    ExternalObject,
    Function,
    Instance,
    PerRank,
    Tag,
    Unknown,
    Value,
    constant,
    is_agreed,
    is_varying,
    on_rank,
    per_rank,
    tagged,
    tags_of,
)
from ddpdoctor.source.ranks.random_numbers import DATA_METHODS, ORDERING_METHODS, TORCHS, state_of
from ddpdoctor.source.script.module import descend
from ddpdoctor.source.torch_model.buffers import parts_of_module
from ddpdoctor.source.vocabulary import DDP, ENGINE, MODULE, SEEDING


def note_call(machine: Machine, node: ast.AST, name: str, given: Arguments) -> None:
    """Record a call of an external function; of those of Python itself only the few that checks look at."""
    if name in RECORDED_BUILTINS or not name.startswith("builtins."):
        machine.note("call", name, node, given)
    elif name in READING_FUNCTIONS and any(_is_computed(one) for one in given.positional):
        machine.note("call", name, node, given, given.positional[0])
    if name.startswith("torch.nn.init.") and name.rpartition(".")[2] not in _FIXED:
        _note_draw(machine, node, given)
    if name == f"{ENVIRONMENT}.setdefault" and given.positional:
        machine.note("call", SET_DEFAULT, node, given)


_MODE = regex(r"[rwxa][bt+]*$")


def note_method(machine: Machine, node: ast.AST, receiver: Value, name: str, given: Arguments) -> None:
    """Record a call of a method, if a check may look at it."""
    for kind in _kinds_of_method(name):
        machine.note(kind, name, node, given, receiver)
    if name in GROWING_METHODS and given.positional:
        _note_part(machine, node, receiver, given.positional[-1])
    if name == "open" and _MODE.match(str(constant(given.value("mode", 0) or NONE))):
        # The method of a path is the function that is given the path first; one of an archive is given a name.
        machine.note("call", "builtins.open", node, Arguments([receiver, *given.positional], given.named))
    if machine.wrapped and is_in_place(name) and _is_apart(machine, given.values):
        machine.note("training", CHANGED, node, given, receiver=receiver)
    if name in _DRAWING:
        _note_draw(machine, node, given, receiver)
    if name in READING_METHODS:
        if _is_computed(receiver):
            machine.note("call", name, node, given, receiver)
    elif name == "cuda" and not given.positional and "device" not in given.named:
        machine.note("call", name, node, given, receiver)


def _is_computed(value: Value) -> bool:
    return any(kind in OF_MODELS or kind == "batch" for kind, _ in tags_of(value))


def is_noted_method(name: str) -> bool:
    """Return whether some calls of a method may be recorded."""
    known = name in ("cuda", "open") or name in READING_METHODS or name in GROWING_METHODS or name in _DRAWING
    return known or is_in_place(name) or bool(_kinds_of_method(name))


def is_in_place(name: str) -> bool:
    """Return whether a method changes its tensor, or a function its first argument, by torch's rule for names."""
    return name[-1:] == "_" and name[0] != "_" and name[-2:] != "__" and name != "requires_grad_"


def _note_draw(machine: Machine, node: ast.AST, given: Arguments, receiver: Value | None = None) -> None:
    """Record that something is drawn anew beside a DDP object, with the state of torch's generator."""
    if machine.wrapped and "generator" not in given.named:
        state = {"state": state_of(machine, TORCHS)}
        machine.note("training", DRAWN_ANEW, node, Arguments(given.positional, state), receiver=receiver)


def _is_apart(machine: Machine, given: Iterable[Value]) -> bool:
    """Return whether only some ranks come here, or with another number on each."""
    return machine.mask != ALL_RANKS or any(
        differ_by_rank(value) or DRAWN in tags_of(value) or is_own(value) for value in given
    )


# Kinds of the tags of what no two ranks have alike.
_OWN = frozenset({"batch", "ddp", "clock", "drawn", "part", "reduced"})


def is_own(value: Value) -> bool:
    """Return whether each rank has computed a value from its own batches, clock, random numbers or part of the data."""
    return is_varying(value) and not is_agreed(value) and any(kind in _OWN for kind, _ in tags_of(value))


def differ_by_rank(value: Value) -> bool:
    """Return whether a value is a known number, and not the same one on all ranks."""
    lanes = value.values if isinstance(value, PerRank) and not value.guessed else ()
    known = [one.value for one in lanes if isinstance(one, Const) and type(one.value) in (int, float)]
    return len(set(known)) > 1 and len(known) == len(lanes)


def note_item(machine: Machine, node: ast.AST, container: Value, key: Value, value: Value) -> None:
    """Record an assignment to a variable of the environment, or to a setting of an optimizer."""
    if {kind for kind, _ in tags_of(container)} == {"param-groups"} and constant(key) in GROUP_SETTINGS:
        machine.note("training", SET_PARAM_GROUP, node, Arguments((key, value)), receiver=container)
    _note_part(machine, node, container, value)
    holder = node.value if isinstance(node, ast.Subscript) else None
    if isinstance(holder, ast.Attribute) and holder.attr in ("_modules", "_parameters"):
        owner = machine.evaluate(holder.value)
        if isinstance(owner, (Instance, ExternalObject)) and isinstance(value, (Instance, ExternalObject)):
            machine.note("training", "set attribute", node, Arguments((value,)), receiver=owner)
    if container == External(ENVIRONMENT) and isinstance(constant(key), str):
        machine.note("call", SET_VARIABLE, node, Arguments((key, value)))


@lru_cache(maxsize=16_384)
def _kinds_of_method(name: str) -> tuple[EventKind, ...]:
    kinds: list[EventKind] = ["call"] if name in KEPT_METHODS else []
    if name in TRAINING_METHODS or SEEDING.search(name):
        kinds.append("training")
    return tuple(kinds)


RESULT: Tag = ("result", 0)
"""Of what DeepSpeed's engine, or a collective of the results of a DDP model, gives."""
OF_MODELS = frozenset({"ddp", RESULT[0]})
"""Kinds of the tags of what such a model has computed."""


# Names of the calls that are recorded for checks.

ENVIRONMENT = "os.environ"
SET_VARIABLE = "set environment variable"
"""Name of the event of an assignment to ``os.environ``; its arguments are the variable and its value."""
SHARDED = "shard"
"""Name of the event of a module whose parameters are replaced by shards; it is the receiver."""
SET_PARAM_GROUP = "set a setting of a parameter group"
"""Name of the event of ``optimizer.param_groups[0]["lr"] = rate``; its arguments are the setting and its value."""
GROUP_SETTINGS = frozenset({"lr", "weight_decay", "momentum", "betas", "eps"})
"""Settings of the optimizers of torch that a step of theirs depends on."""
SET_DEFAULT = "set default of environment variable"
FILE_CALLS = frozenset(
    {"os.mkdir", "os.makedirs", "os.symlink", "os.remove", "os.unlink", "os.rmdir", "os.rename", "os.replace"}
    | {"shutil.rmtree"}
)
CONTENT_METHODS = frozenset(
    {"write_text", "write_bytes", "read_text", "read_bytes", "to_csv", "to_parquet"}
    | {"save_pretrained", "save", "savefig", "save_to_disk"}
)
RECORDED_BUILTINS = frozenset({"builtins.open", "builtins.print"})
"""Of Python's own functions those whose calls are recorded; of all other libraries every call is."""
FILE_METHODS = frozenset({"mkdir", "symlink_to", "unlink", "rmdir"})
READING_METHODS = frozenset({"item", "cpu", "tolist", "numpy"})
"""Methods of a tensor that wait for the GPU."""
GROWING_METHODS = frozenset({"append", "insert"})
"""Methods of torch's containers that give them one more module."""
READING_FUNCTIONS = frozenset({"builtins.float", "builtins.int"})
"""Functions that do so with a tensor."""
STATE_METHODS = frozenset({"state_dict", "load_state_dict"})
TRACKING_METHODS = frozenset({
    "add_scalar", "add_scalars", "log_metric", "log_metrics", "log", "info", "pprint", "print", "set_description",
    "set_postfix",
})  # fmt: skip
"""Methods of trackers, loggers and printers."""
LOGGER_METHODS = frozenset({"setLevel", "addHandler", "setFormatter"})
"""Methods that decide which of a process's log lines are shown."""
PRINT_REPLACED = "replace print"
"""Name of the event of ``builtins.print = something_else``."""
KEPT_METHODS = (
    STATE_METHODS | FILE_METHODS | TRACKING_METHODS | CONTENT_METHODS | DATA_METHODS | LOGGER_METHODS | ORDERING_METHODS
)
"""Methods whose calls are always recorded."""

TRAINING_METHODS = frozenset({
    "parameters", "named_parameters", "children", "step", "zero_grad", "requires_grad_", "register_parameter",
    "add_module", "add_param_group", "manual_seed", "extractall", "no_sync",
})  # fmt: skip
"""Names of the methods whose calls are recorded as events of the kind ``training``."""


# What a script does to the modules inside and outside of DDP objects, recorded for the checks of gradients.

UNWRAPPED_FORWARD = "forward outside of DDP"
"""Name of the event of a forward without gradients, of a module that no DDP object holds, or of an engine."""


CHANGED = "changed in place"
"""Name of the event of ``parameter.grad.mul_(0.5)`` or ``parameter.data = other`` on some ranks or by the rank."""
DRAWN_ANEW = "drawn anew"
"""Name of the event of ``parameter.normal_()``; its argument ``state`` is that of torch's generator."""
_FIXED = frozenset({"constant_", "ones_", "zeros_", "eye_", "dirac_"})
# Methods of a tensor, and of a module, that draw it anew.
_DRAWING = frozenset(
    {"normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_", "reset_parameters"}
)
SET_REQUIRES_GRAD = "set requires_grad"
"""Name of the event of ``parameter.requires_grad = False``."""


def note_attribute(machine: Machine, node: ast.AST, name: str, value: Value) -> None:
    """Record that an attribute is read from a DDP object, outside of a ``try`` that may catch its absence."""
    if not isinstance(value, ExternalObject) or value.name != DDP or machine.trying:
        return
    if value.number not in machine.handing_on or name == "module":
        machine.note("training", f"ddp.{name}", node, receiver=value)


def note_attribute_set(machine: Machine, node: ast.Attribute, owner: Value, value: Value) -> None:
    """Record that a module is given a new attribute outside of its constructor, or that DDP is not to synchronise."""
    if isinstance(owner, ExternalObject) and owner.name == DDP and node.attr == "require_backward_grad_sync":
        machine.note("training", f"set {node.attr}", node, Arguments((value,)), receiver=owner)
    if node.attr == "requires_grad":
        machine.note("training", SET_REQUIRES_GRAD, node, Arguments((value,)), receiver=owner)
    if node.attr in ("grad", "data") and machine.wrapped and _is_apart(machine, ()):
        machine.note("training", CHANGED, node, Arguments((value,)), receiver=owner)
    if isinstance(owner, Instance) and machine.loops and machine.keeps_workers:
        machine.note("attribute", node.attr, node, Arguments((value,)), receiver=owner)
    if isinstance(owner, ExternalObject):
        _note_part(machine, node, owner, value)
    if not isinstance(owner, Instance) or not isinstance(value, (Instance, ExternalObject)):
        return
    inside = (frame.owner for frame in machine.frames if frame.owner is not None and frame.owner.receiver == owner)
    if any(getattr(method.node, "name", "") in ("__init__", "forward") for method in inside):
        return
    machine.note("training", "set attribute", node, Arguments((value,)), receiver=owner)


def note_augmented(machine: Machine, node: ast.Attribute, added: ast.expr) -> None:
    """Record ``parameter.grad += number``, where the number is another one on each rank."""
    if (
        node.attr in ("grad", "data")
        and machine.wrapped
        and not any(isinstance(one, ast.Call) for one in descend(added))
    ):
        value = machine.evaluate(added)
        if _is_apart(machine, (value,)):
            machine.note("training", CHANGED, node, Arguments((value,)), receiver=machine.held(node.value))


def _note_part(machine: Machine, node: ast.AST, owner: Value, value: Value) -> None:
    """Record that a module of a library is given a module, where DDP holds it."""
    if isinstance(owner, ExternalObject) and (owner.number in machine.wrapped or owner.name == DDP):
        machine.note("training", "set attribute", node, Arguments((value,)), receiver=owner)


ABSENT = "use of None"
"""Name of the calls that stand for a use, as an object, of what is None on some of the ranks that come there."""


def note_absent(machine: Machine, node: ast.AST, value: Value) -> None:
    """Note that ranks take something of a value, or go over it, that is None on some of them and not on the others.

    Not where a condition of unknown origin may keep these ranks out, nor where a failure is caught.
    """
    if value.__class__ is not PerRank or not _is_certain(machine):
        return
    here = [on_rank(value, rank) for rank in RANKS if machine.mask >> rank & 1]
    if NONE in here and any(one != NONE for one in here):
        machine.note("call", ABSENT, node, Arguments((value,)))


UNASSIGNED = "use of a name without a value"
"""Name of the calls that stand for the use of a variable, or an attribute, that only some of the ranks gave a value."""


def note_unassigned(machine: Machine, node: ast.AST, owner: int, name: str) -> None:
    """Note that ranks use a variable or an attribute that some of them never gave a value, as ``note_absent`` does.

    One of the first two is such a rank: a job of two has no ranks 2 and 3 that need the name.
    """
    made = machine.store.makers(owner, name)
    whole = machine.store.makers(owner, ARGUMENTS)  # Of an object, the ranks that made it.
    if made is None or "locals" in machine.frame.module.words:
        return
    absent = machine.mask & (ALL_RANKS if whole is None else whole) & ~made
    if absent & 0b11 and machine.mask & made and _is_certain(machine):
        lanes = per_rank([NONE if absent >> rank & 1 else OPAQUE for rank in RANKS])
        machine.note("call", UNASSIGNED, node, Arguments((lanes,)))


def _is_certain(machine: Machine) -> bool:
    """Return whether the present ranks come here, and a failure is not caught."""
    if machine.quiet or machine.trying or machine.in_parent:
        return False
    return all(isinstance(one, Unknown) and not one.varying and not one.opaque for one in machine.deciding)


def note_own_step(machine: Machine, node: ast.AST, function: Function, given: Arguments) -> None:
    """Record a step of an optimizer whose class the project derives from one of torch, and what gets an epoch."""
    owner, name = function.receiver, getattr(function.node, "name", "")
    if name == "set_epoch":
        machine.note("set-epoch", name, node, given, receiver=owner)
    if name not in ("step", "zero_grad") or not isinstance(owner, Instance):
        return
    if any(base.startswith("torch.optim.") for base in base_names(machine, owner.cls)):
        machine.note("training", name, node, given, receiver=owner)


def note_wrap(machine: Machine, module: Value | None, wrap: int) -> None:
    """Remember the modules inside a DDP object, so that a forward past it is recognised."""
    if module is None:
        return
    for part in parts_of_module(machine, module):
        if isinstance(part, (Instance, ExternalObject)):
            machine.wrapped.setdefault(part.number, wrap)


def _is_model(machine: Machine, module: Instance | ExternalObject) -> bool:
    if isinstance(module, ExternalObject):
        return module.name == ENGINE or MODULE.search(module.name) is not None
    return machine.store.get(module.cls.scope, "forward") is not None


def bare_forward(machine: Machine, node: ast.AST, module: Value, given: Arguments, result: Value) -> Value:
    """Return the result of a forward (or other method) of a module in a DDP object that was not called through it."""
    if not isinstance(module, (Instance, ExternalObject)) or machine.inside_ddp:
        return result
    wrap = machine.wrapped.get(module.number)
    if wrap is None:
        if not machine.gradients and _is_model(machine, module):
            machine.note("training", UNWRAPPED_FORWARD, node, given, receiver=module)
        return result
    machine.note("training", "bare forward", node, given, receiver=module)
    return tagged(result, frozenset({("bare", wrap)})) if machine.gradients else result
