"""Where ``no_sync`` stands, or what does the same: around the forward, the backward only, or the wrong micro-step."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Literal

import msgspec

from ddpdoctor.checks.gradients.misplaced_no_sync.modulo_conditions import agree
from ddpdoctor.checks.gradients.misplaced_no_sync.sync_attribute import (
    always_off,
    off_in_last_turn,
    settings_of,
    test_around,
)
from ddpdoctor.source.events import ContextAround, Event
from ddpdoctor.source.interpreter.values import NO_SYNC, options_of
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.optimizers import steps
from ddpdoctor.source.queries.wrapped_models import averages_by_hand, innermost_loop, training_forwards, wrap_numbers
from ddpdoctor.source.script.module import Module
from ddpdoctor.source.script.text_search import mentions_any

Mistake = Literal["never-synchronised", "last-unsynchronised", "backward-only"]
_OTHER_AVERAGING = ("PostLocalSGD", "PeriodicModelAverager", "average_parameters", "ccelerat", "lightning", "deepspeed")


class MisplacedNoSync(msgspec.Struct, frozen=True, eq=False):
    """A ``no_sync`` that leaves gradients unaveraged, or saves nothing."""

    mistake: Mistake
    backward: Event
    context: ContextAround
    """The ``with`` item, or the target of an assignment to the attribute that it sets."""
    step: Event | None = None
    """The step that uses the gradients, where the wrong micro-step is left out."""


def misplaced_no_syncs(projection: Projection) -> Iterator[MisplacedNoSync]:
    """Every misplaced ``no_sync`` of a script, once."""
    script = projection.machine.script
    if mentions_any(script, _OTHER_AVERAGING) or averages_by_hand(script):
        return
    seen: set[ast.AST] = set()
    for backward in projection.in_course("backward"):
        numbers = wrap_numbers(backward.receiver)
        if len(numbers) != 1 or backward.node in seen:
            continue
        found = _judge(projection, backward, next(iter(numbers)))
        if found is not None:
            seen.add(backward.node)
            yield found


def _judge(projection: Projection, backward: Event, number: int) -> MisplacedNoSync | None:
    loop = innermost_loop(backward)
    forwards = training_forwards(projection, number)
    near = [event for event in forwards if innermost_loop(event) is loop]
    if not near or not forwards:
        return None
    moves = [step for step in steps(projection) if loop is None or innermost_loop(step) is loop or loop in _loops(step)]
    around_forward = [context for event in forwards if (context := _certain(event)) is not None]
    if moves and len(around_forward) == len(forwards):
        return MisplacedNoSync("never-synchronised", backward, around_forward[0])
    settings = settings_of(projection, number)
    switched = always_off(projection.machine.script, settings, forwards) if moves else None
    if switched is not None:
        return MisplacedNoSync("never-synchronised", backward, _place_of(switched))
    around_backward = _possible(backward)
    if around_backward is not None and not any(_possible(event) for event in near):
        return MisplacedNoSync("backward-only", backward, around_backward)
    for step in moves:
        wrong = off_in_last_turn(settings, near[0], step) if innermost_loop(step) is loop else None
        if wrong is not None:
            return MisplacedNoSync("last-unsynchronised", backward, _place_of(wrong), step)
    return _wrong_turn(backward, near, moves)


def _place_of(setting: Event) -> ContextAround:
    """An assignment that does what the context does."""
    assert isinstance(setting.node, ast.expr)
    return ContextAround(setting.node, setting.module, NO_SYNC)


def _loops(event: Event) -> list[ast.AST]:
    return [loop.node for loop in event.loops]


def _certain(event: Event) -> ContextAround | None:
    return next((context for context in event.contexts if context.value == NO_SYNC), None)


def _possible(event: Event) -> ContextAround | None:
    return next((context for context in event.contexts if NO_SYNC in options_of(context.value)), None)


def _wrong_turn(backward: Event, forwards: list[Event], moves: list[Event]) -> MisplacedNoSync | None:
    """A ``no_sync`` entered in the very turn in which the optimizer steps."""
    for step in moves:
        stepping = test_around(step)
        if stepping is None or innermost_loop(step) is not innermost_loop(backward):
            continue
        for forward in forwards:
            context = _possible(forward)
            if context is None:
                continue
            entering = _condition_of_no_sync(forward, context)
            if entering is not None and agree(forward.module, entering, stepping):
                return MisplacedNoSync("last-unsynchronised", backward, context, step)
    return None


def _condition_of_no_sync(forward: Event, context: ContextAround) -> ast.expr | None:
    """The condition under which a ``with`` item of the forward's function is ``no_sync()``."""
    node: ast.expr = context.node
    module = context.module
    if isinstance(node, ast.Name):
        assigned = _only_assignment(module, node.id)
        if assigned is None:
            return None
        node = assigned
    if isinstance(node, ast.IfExp):
        if _calls_no_sync(node.body) and not _calls_no_sync(node.orelse):
            return node.test
        if _calls_no_sync(node.orelse) and not _calls_no_sync(node.body):
            return ast.UnaryOp(ast.Not(), node.test)
    if _calls_no_sync(node) and isinstance(node, ast.Call):
        return test_around(msgspec.structs.replace(forward, node=node, module=module))
    return None


def _only_assignment(module: Module, name: str) -> ast.expr | None:
    values = [
        node.value
        for node in module.index.of(ast.Assign)
        if any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    ]
    return values[0] if len(values) == 1 else None


def _calls_no_sync(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "no_sync"
