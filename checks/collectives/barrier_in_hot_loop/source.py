"""Collectives in every step of training that the step does not need."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import msgspec

from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import ALL_RANKS, tags_of
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.job_kind import framework
from ddpdoctor.source.queries.numbers import SHOWS, followers
from ddpdoctor.source.queries.sync_points import BARRIERS, function_around, mentions, nodes_of
from ddpdoctor.source.queries.wrapped_models import innermost_loop
from ddpdoctor.source.script.syntax_index import last_name

_REDUCTIONS = frozenset({"all_reduce", "reduce"})
_KEEPING = frozenset({"update", "append", "add", "float", "int", "str", "round", "format", "len", "range"})
"""Last names of functions that keep a number for later, or give it another form."""


class EveryStep(msgspec.Struct, frozen=True, eq=False):
    """A collective in every turn of a loop that trains."""

    event: Event
    backward: Event
    meeting: str
    """What brings the ranks together in the same turn: ``backward``, or another collective."""
    is_barrier: bool
    """A barrier; otherwise a reduction whose result is only looked at."""


def every_step(projection: Projection) -> Iterator[EveryStep]:
    """Barriers, and reductions of a loss or metric that nothing is decided by, which run as often as a backward."""
    backwards = [event for event in projection.of_kind("backward") if event.loops]
    seen: set[ast.AST] = set()
    for event in projection.of_kind("collective"):
        if event.node in seen or not event.loops or event.guards or event.ranks != ALL_RANKS:
            continue
        is_barrier = event.name in BARRIERS
        if not is_barrier and not (event.name in _REDUCTIONS and _for_logging(event)):
            continue
        for backward in backwards:
            meeting = _meeting_beside(projection, event, backward)
            if _as_often(event, backward) and meeting is not None:
                seen.add(event.node)
                yield EveryStep(event, backward, meeting, is_barrier)
                break


def _meeting_beside(projection: Projection, event: Event, backward: Event) -> str | None:
    """Return what makes all ranks meet in the turn of a backward; None where nothing else is seen to: no DDP, no
    reduction.
    """
    wrappers = ("DataParallel", "fully_shard")  # Of apex, and of FSDP.
    other = any(event.name.endswith(wrappers) for event in projection.of_kind("object", "call"))
    if other or any(projection.of_kind("wrap")) or framework(projection.machine.script):
        return "backward"
    loop = backward.loops[-1].node
    others = (
        one for one in projection.of_kind("collective") if one.name not in BARRIERS and one.node is not event.node
    )
    beside = (one for one in others if one.ranks == ALL_RANKS and any(around.node is loop for around in one.loops))
    return next((one.name for one in beside), None)


def _as_often(event: Event, backward: Event) -> bool:
    """Return whether a collective runs in every turn of the innermost loop around a backward, whatever the step's
    number; a loop over a single micro-step is none.
    """
    loop = event.loops[-1]
    if loop.once or loop.node is not innermost_loop(backward):
        return False
    return event.conditions == backward.conditions[: len(event.conditions)]


def _for_logging(event: Event) -> bool:
    """Return whether what is reduced is a number of the batch that is only shown or kept in meters.

    No condition, backward, attribute, result or other call uses it, nor what is computed from it.
    """
    arguments = getattr(event.node, "args", [])
    if not arguments or not isinstance(arguments[0], ast.Name) or not event.positional:
        return False
    if not any(kind in ("ddp", "batch") for kind, _ in tags_of(event.positional[0])):
        return False
    nodes = list(nodes_of(function_around(event.module, event.node)))
    names = followers(nodes, arguments[0].id)
    return not any(_uses(event, node, names) for node in nodes)


def _uses(event: Event, node: ast.AST, names: set[str]) -> bool:
    """Return whether a node does something else with one of some numbers than to show it or to compute with it."""
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        return mentions(node.test, names)
    if isinstance(node, (ast.Return, ast.Yield)):
        return node.value is not None and mentions(node.value, names)
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return ast.unparse(node) in names
    if not isinstance(node, ast.Call) or node is event.node or node.lineno < getattr(event.node, "lineno", 0):
        return False
    method = node.func if isinstance(node.func, ast.Attribute) else None
    if method is not None and mentions(method.value, names):
        return method.attr == "backward"
    name = last_name(node.func)
    if name in SHOWS | _KEEPING or event.module.resolve(node.func).startswith(("torch.", "numpy.")):
        return False
    return any(mentions(part, names) for part in (*node.args, *(entry.value for entry in node.keywords)))
