"""DistributedDataParallel: its construction, its calls, and project classes that derive from it."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.attributes import bound_to, keeps_buffers_apart
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    NONE,
    OPAQUE,
    Arguments,
    BoundMethod,
    Const,
    ExternalObject,
    Function,
    Instance,
    OneOf,
    ProjectClass,
    Unknown,
    Value,
    constant,
    derived,
    options_of,
    tagged,
    tags_of,
)
from ddpdoctor.source.ranks.random_numbers import TORCHS, is_by_rank, state_of
from ddpdoctor.source.ranks.rank_local_values import chooses_keys, of_own_data
from ddpdoctor.source.script.module import once_each
from ddpdoctor.source.torch_model.buffers import has_buffers
from ddpdoctor.source.torch_model.recorded_calls import note_wrap
from ddpdoctor.source.vocabulary import DDP, ENGINE

SHARDED_TAGS = ("sharded", "parallel")
"""Kinds of the tags of what came out of a model that is sharded over all ranks, with data of their own or the same."""

PASSED_ON = (
    *("dim", "broadcast_buffers", "bucket_cap_mb", "find_unused_parameters", "check_reduction"),
    *("gradient_as_bucket_view", "static_graph"),
)
"""Options that frameworks hand on to DDP, in the order in which Accelerate takes them."""
UNKNOWN_OPTIONS: Mapping[str, Value] = dict.fromkeys(PASSED_ON, OPAQUE)
UNREAD_BACKWARD = "backward that an unread object runs"
"""Name of the event of ``engine.backward(loss)``, where nothing is known of the engine."""
"""The options of a framework that sets them where it was not followed."""


def wrap(machine: Machine, node: ast.AST, given: Arguments, *, number: int = 0) -> Value:
    """Construct DDP: a collective of its process group; ``number`` is the object's, where it has one already."""
    number = number or machine.object_number(node)
    group = given.named.get("process_group", NONE)
    in_tree = given.complete and constant(group) is None
    machine.emit("wrap", DDP, node, given, number=number, in_tree=in_tree)
    note_wrap(machine, given.positional[0] if given.positional else given.named.get("module"), number)
    return ExternalObject(number, DDP)


def call_wrapped(machine: Machine, node: ast.AST, value: ExternalObject, given: Arguments) -> Value:
    """Run a forward through DDP; it broadcasts buffers when the module has some and gradients are recorded."""
    made = machine.object(value)
    module = made.argument("module", 0) if made is not None else None
    tags = frozenset({("ddp", value.number)}) if machine.gradients else frozenset()
    recording = machine.gradients and machine.synchronising and made is not None and synchronises_buffers(made)
    if recording and module is not None and _holds_buffers(machine, module):
        machine.emit("forward", "forward of the DDP model", node, given, receiver=value, in_tree=True)
    machine.emit("ddp-forward", "forward", node, given, receiver=value)
    arguments = given.values
    if isinstance(module, Instance) and (
        module.cls.node.name in machine.mentions.synchronising or chooses_keys(machine, module.cls)
    ):
        machine.inside_ddp += 1
        try:
            result = machine.apply(node, module, given)
        finally:
            machine.inside_ddp -= 1
        made_of = result if not isinstance(result, (ExternalObject, Instance, OneOf, Const)) else derived(arguments)
        return tagged(of_own_data(made_of) if tags else made_of, tags)
    result = derived(arguments, tags)
    # Of data that came from no loader nothing is known, but that it was drawn with the rank's own seed.
    drawn = (
        is_by_rank(state_of(machine, TORCHS))
        and result.tags == tags
        and any(isinstance(value, Unknown) for value in arguments)
    )
    result = Unknown(result.varying or drawn, False, result.tags)
    return of_own_data(result) if tags else result


def _holds_buffers(machine: Machine, module: Value) -> bool:
    """Return whether a wrapped module holds buffers, looked up at its first forward: DDP itself looks when it wraps."""
    if not isinstance(module, (Instance, ExternalObject)):
        return has_buffers(machine, module)
    known: dict[int, bool] = machine.script.__dict__.setdefault("_holding_buffers", {})
    if module.number not in known:
        known[module.number] = has_buffers(machine, module)
    return known[module.number]


def synchronises_buffers(made: Event) -> bool:
    """Return whether a DDP construction leaves the synchronisation of buffers on."""
    return made.complete and not keeps_buffers_apart(made)


def backward(machine: Machine, node: ast.AST, losses: Sequence[Value], receiver: Value) -> None:
    """Record a call of ``backward``: it synchronises when what it starts from went through DDP, or is sharded."""
    tags = frozenset(tag for loss in (*losses, receiver) for tag in tags_of(loss))
    through_ddp = any(kind == "ddp" for kind, _ in tags)
    by_engine = isinstance(receiver, ExternalObject) and receiver.name == ENGINE
    if isinstance(receiver, ExternalObject) and by_engine:
        tags |= {("engine", receiver.number)}
    sharded = any(kind in SHARDED_TAGS for kind, _ in tags)
    together = through_ddp or sharded or by_engine
    whose = "DDP" if through_ddp or not together else "sharded" if sharded else "engine's"
    unread = not together and any(isinstance(loss, Unknown) and loss.opaque for loss in (*losses, receiver))
    run_by_unread = unread and bool(losses) and any(map(_is_unread, options_of(receiver)))
    machine.emit(
        "backward",
        UNREAD_BACKWARD if run_by_unread else f"backward through the {whose} model",
        node,
        Arguments(losses),
        receiver=Unknown(opaque=unread, tags=tags),
        in_tree=together and machine.synchronising,
    )


def _is_unread(value: Value) -> bool:
    while isinstance(value, BoundMethod):
        value = value.receiver
    return isinstance(value, Unknown) and value.opaque


_HANDS_ON = "__getattr__"
# Methods of a class derived from DDP that leave its forward and its synchronisation alone.
_ADDED = frozenset({"__init__", _HANDS_ON})


@once_each
def is_thin_wrap(machine: Machine, cls: ProjectClass) -> bool:
    """Return whether a class derives from DDP directly and changes nothing that checks rely on."""
    module = machine.script.module(cls.module)
    if module is None or [module.resolve(base) for base in cls.node.bases] != [DDP]:
        return False
    return all(map(_changes_nothing, cls.node.body))


def wrap_by_class(
    machine: Machine, node: ast.AST, instance: Instance, constructor: Value | None, given: Arguments
) -> Value:
    """Construct DDP through such a class; an object whose constructor wraps nothing stays what it is."""
    if any(getattr(statement, "name", "") == _HANDS_ON for statement in instance.cls.node.body):
        machine.handing_on.add(instance.number)
    if isinstance(constructor, Function):
        machine.call_function(node, bound_to(constructor, instance), given)
    else:
        wrap(machine, node, given, number=instance.number)
    # What a walk does that is taken back is not kept.
    return ExternalObject(instance.number, DDP) if machine.quiet or instance.number in machine.events else instance


def _changes_nothing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.FunctionDef):
        return statement.name in _ADDED
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )
