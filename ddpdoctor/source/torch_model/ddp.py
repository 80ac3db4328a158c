"""DDP in the rank projection: what its construction, its forward and a backward through it synchronise."""

from __future__ import annotations

import ast

from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    NONE,
    UNIFORM,
    Built,
    Choice,
    Const,
    Instance,
    Unknown,
    Value,
    constant,
    derived,
    tagged,
    tags_of,
)
from ddpdoctor.source.ranks.rank_local_values import chooses_keys
from ddpdoctor.source.torch_model.buffers import has_buffers
from ddpdoctor.source.torch_model.recorded_training import note_wrap
from ddpdoctor.source.vocabulary import DDP


def wrap(
    machine: Machine,
    node: ast.AST,
    positional: list[Value],
    named: dict[str, Value],
    complete: bool,
    *,
    number: int = 0,
) -> Value:
    """Construct DDP: a collective of its process group; ``number`` is the object's, where it has one already."""
    number = number or machine.object_number(node)
    group = named.get("process_group", NONE)
    in_tree = complete and constant(group) is None
    machine.emit("wrap", DDP, node, positional, named, number=number, complete=complete, in_tree=in_tree)
    note_wrap(machine, positional[0] if positional else named.get("module"), number)
    return Built(number, DDP)


def call_wrapped(
    machine: Machine, node: ast.AST, value: Built, positional: list[Value], named: dict[str, Value], complete: bool
) -> Value:
    """A forward through DDP; it broadcasts buffers when the module has some and gradients are recorded."""
    made = machine.object(value)
    module = made.argument("module", 0) if made is not None else None
    tags = frozenset({("ddp", value.number)}) if machine.gradients else frozenset()
    recording = machine.gradients and machine.synchronising and made is not None and synchronises_buffers(made)
    if recording and module is not None and _holds_buffers(machine, module):
        machine.emit("forward", "forward of the DDP model", node, positional, named, receiver=value, in_tree=True)
    machine.emit("ddp-forward", "forward", node, positional, named, receiver=value)
    arguments = [*positional, *named.values()]
    if isinstance(module, Instance) and (
        module.cls.node.name in machine.mentions.synchronising or chooses_keys(machine, module.cls)
    ):
        machine.inside_ddp += 1
        try:
            result = machine.apply(machine, node, module, positional, named, complete)
        finally:
            machine.inside_ddp -= 1
        return tagged(result if not isinstance(result, (Built, Instance, Choice, Const)) else derived(arguments), tags)
    result = derived(arguments, tags)
    # Of data that came from no loader nothing is known, but that it was drawn with the rank's own seed.
    drawn = machine.draws_apart and result.tags == tags and any(isinstance(value, Unknown) for value in arguments)
    return Unknown(result.varying or drawn, False, result.tags)


def _holds_buffers(machine: Machine, module: Value) -> bool:
    """Whether a wrapped module holds buffers, looked up at its first forward: DDP itself looks when it wraps."""
    if not isinstance(module, (Instance, Built)):
        return has_buffers(machine, module)
    known: dict[int, bool] = machine.script.__dict__.setdefault("_holding_buffers", {})
    if module.number not in known:
        known[module.number] = has_buffers(machine, module)
    return known[module.number]


def synchronises_buffers(made: Event) -> bool:
    """Whether a DDP construction leaves the synchronisation of buffers on."""
    options = ("broadcast_buffers", "forward_sync_buffers")
    return made.complete and not any(constant(made.named.get(name, UNIFORM)) is False for name in options)


def backward(machine: Machine, node: ast.AST, losses: list[Value], receiver: Value) -> None:
    """A call of ``backward``: it synchronises when what it starts from went through DDP."""
    tags = frozenset(tag for loss in (*losses, receiver) for tag in tags_of(loss))
    through_ddp = any(kind == "ddp" for kind, _ in tags)
    machine.emit(
        "backward",
        "backward through the DDP model",
        node,
        losses,
        receiver=Unknown(tags=tags),
        in_tree=through_ddp and machine.synchronising,
    )
