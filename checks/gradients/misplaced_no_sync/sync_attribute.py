"""``model.require_backward_grad_sync = …``: in which turns of a loop it leaves synchronisation off."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from ddpdoctor.checks.gradients.misplaced_no_sync.modulo_conditions import agree
from ddpdoctor.source.events import Event
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.wrapped_models import ddp_objects, innermost_loop, training_events
from ddpdoctor.source.script.script import Script

ATTRIBUTE = "require_backward_grad_sync"
_ALWAYS, _NEVER = ast.Constant(True), ast.Constant(False)


def settings_of(projection: Projection, number: int) -> list[Event]:
    """The assignments to the attribute of a DDP object, in their order."""
    return [event for event in training_events(projection, f"set {ATTRIBUTE}") if number in ddp_objects(event.receiver)]


def always_off(script: Script, settings: Sequence[Event], forwards: Sequence[Event]) -> Event | None:
    """The only place that speaks of the attribute, when it assigns ``False`` under no condition before all forwards."""
    mentions = sum(module.text.count(ATTRIBUTE) for module in script.modules)
    if len(settings) != 1 or mentions != 1 or settings[0].undecided or test_around(settings[0]) is not None:
        return None
    before_all = all(settings[0].ordinal < forward.ordinal for forward in forwards)
    return settings[0] if before_all and _off_by(settings[0]) is _ALWAYS else None


def off_in_last_turn(settings: Sequence[Event], forward: Event, step: Event) -> Event | None:
    """An assignment that leaves synchronisation off in the forward of the turn in which the optimizer steps.

    DDP reads the attribute in its forward: what is assigned behind it holds from the next turn on.
    """
    loop, stepping = innermost_loop(forward), test_around(step)
    if not settings or stepping is None or any(innermost_loop(event) is not loop for event in settings):
        return None
    off = _off_when(settings)
    if off is None:
        return None
    module = forward.module
    if all(event.ordinal < forward.ordinal for event in settings):
        return settings[0] if agree(module, off, stepping) else None
    late = all(event.ordinal > forward.ordinal for event in settings)
    on = ast.UnaryOp(ast.Not(), off)
    return settings[0] if late and agree(module, on, stepping) and agree(module, stepping, on) else None


def test_around(event: Event) -> ast.expr | None:
    """The condition of the innermost ``if`` around an event in its function and loop, turned round in ``else``."""
    below: ast.AST = event.node
    for around in event.module.ancestors(event.node):
        if isinstance(around, (ast.FunctionDef, ast.For, ast.While)):
            return None
        if isinstance(around, ast.If):
            return around.test if below in around.body else ast.UnaryOp(ast.Not(), around.test)
        below = around
    return None


def _off_when(settings: Sequence[Event]) -> ast.expr | None:
    """The condition under which synchronisation is off after some assignments; None when it is not that simple."""
    off: ast.expr = _NEVER
    for event in settings:
        new, test = _off_by(event), test_around(event)
        if new is None:
            return None
        if test is None:
            off = new
        elif new is _ALWAYS and off is _NEVER:
            off = test
        elif new is _NEVER and off is _ALWAYS:
            off = ast.UnaryOp(ast.Not(), test)
        elif new is not _NEVER or not (off is _NEVER or _excludes(test, off)):
            return None
    return off


def _off_by(event: Event) -> ast.expr | None:
    statement = event.module.parents.get(event.node)
    if not isinstance(statement, ast.Assign):
        return None
    value = statement.value
    if isinstance(value, ast.Constant):
        return _NEVER if value.value else _ALWAYS
    return ast.UnaryOp(ast.Not(), value)


def _excludes(one: ast.expr, other: ast.expr) -> bool:
    """Whether a condition is the opposite of another, as those of an ``if`` and its ``else`` are."""
    return isinstance(one, ast.UnaryOp) and isinstance(one.op, ast.Not) and one.operand is other
