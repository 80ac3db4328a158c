"""What a script does to the modules inside and outside of DDP objects, recorded for the checks of gradients."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from ddpdoctor.source.interpreter.attributes import base_names
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import ExternalObject, Function, Instance, Value, tagged
from ddpdoctor.source.torch_model.buffers import parts_of_module
from ddpdoctor.source.vocabulary import DDP, ENGINE, MODULE

UNWRAPPED_FORWARD = "forward outside of DDP"
"""Name of the event of a forward without gradients, of a module that no DDP object holds, or of an engine."""


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
        machine.note("training", f"set {node.attr}", node, (value,), receiver=owner)
    if node.attr == "requires_grad":
        machine.note("training", SET_REQUIRES_GRAD, node, (value,), receiver=owner)
    if not isinstance(owner, Instance) or not isinstance(value, (Instance, ExternalObject)):
        return
    if any(frame.owner is not None and frame.owner.receiver == owner for frame in machine.frames):
        return
    machine.note("training", "set attribute", node, (value,), receiver=owner)


def note_own_step(
    machine: Machine, node: ast.AST, function: Function, positional: Sequence[Value], named: Mapping[str, Value]
) -> None:
    """Record a step of an optimizer whose class the project derives from one of torch."""
    owner, name = function.receiver, getattr(function.node, "name", "")
    if name not in ("step", "zero_grad") or not isinstance(owner, Instance):
        return
    if any(base.startswith("torch.optim.") for base in base_names(machine, owner.cls)):
        machine.note("training", name, node, positional, named, receiver=owner)


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


def bare_forward(
    machine: Machine,
    node: ast.AST,
    module: Value,
    positional: Sequence[Value],
    named: Mapping[str, Value],
    result: Value,
) -> Value:
    """Return the result of a forward (or other method) of a module in a DDP object that was not called through it."""
    if not isinstance(module, (Instance, ExternalObject)) or machine.inside_ddp:
        return result
    wrap = machine.wrapped.get(module.number)
    if wrap is None:
        if not machine.gradients and _is_model(machine, module):
            machine.note("training", UNWRAPPED_FORWARD, node, positional, named, receiver=module)
        return result
    machine.note("training", "bare forward", node, positional, named, receiver=module)
    return tagged(result, frozenset({("bare", wrap)})) if machine.gradients else result
