"""Classes of the project that are DDP under another name: they add options, or hand on attributes of the module."""

from __future__ import annotations

import ast

from ddpdoctor.source.interpreter.attributes import bound_to
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import Built, Function, Instance, ProjectClass, Value
from ddpdoctor.source.torch_model.ddp import wrap
from ddpdoctor.source.vocabulary import DDP

_HANDS_ON = "__getattr__"
_ADDED = frozenset({"__init__", _HANDS_ON})
"""Methods of a class derived from DDP that leave its forward and its synchronisation alone."""


def is_thin_wrap(machine: Machine, cls: ProjectClass) -> bool:
    """Whether a class derives from DDP directly and changes nothing that checks know about DDP."""
    known: dict[ast.AST, bool] = machine.script.__dict__.setdefault("_thin_wraps", {})
    if cls.node not in known:
        module = machine.script.module(cls.module)
        known[cls.node] = (
            module is not None
            and [module.resolve(base) for base in cls.node.bases] == [DDP]
            and (all(_changes_nothing(statement) for statement in cls.node.body))
        )
    return known[cls.node]


def wrap_by_class(
    machine: Machine,
    node: ast.AST,
    instance: Instance,
    constructor: Value | None,
    positional: list[Value],
    named: dict[str, Value],
    complete: bool,
) -> Value:
    """Construct DDP through such a class; an object whose constructor wraps nothing stays what it is."""
    if any(getattr(statement, "name", "") == _HANDS_ON for statement in instance.cls.node.body):
        machine.handing_on.add(instance.number)
    if isinstance(constructor, Function):
        machine.call_function(machine, node, bound_to(constructor, instance), positional, named, complete)
    else:
        wrap(machine, node, positional, named, complete, number=instance.number)
    # What a walk does that is taken back is not kept.
    return Built(instance.number, DDP) if machine.quiet or instance.number in machine.events else instance


def _changes_nothing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.FunctionDef):
        return statement.name in _ADDED
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )
