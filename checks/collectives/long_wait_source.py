"""Long work of the first rank that the other ranks wait for in their next collective."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

import msgspec

from ddpdoctor.finding import Location
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import ALL_RANKS
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.divergence import events_through, function_around, sync_events
from ddpdoctor.source.script.module import Module
from ddpdoctor.source.script.syntax_index import descend, last_name

_FIRST_RANK = re.compile(
    r"rank\w*(\(\))? == 0\b|rank\w*\"\]\)? == |not \w*rank\b|is_main|is_master|main_process|master_process"
    r"|is_rank_?(0|zero)|RANK.* == "
)


_LONG = frozenset({"map", "generate"})
"""Methods that take as long as there is data."""


class LongWait(msgspec.Struct, frozen=True, kw_only=True):
    """Work under a test of the first rank, with a collective of all ranks behind it."""

    what: str
    """Who does what, as a clause."""
    location: Location
    condition: str
    condition_location: Location
    collective: str
    collective_location: Location


def long_waits(projection: Projection) -> Iterator[LongWait]:
    """Generation and preprocessing on the first rank, in a script that keeps the default timeout."""
    events = [event for event in sync_events(projection) if event.ranks == ALL_RANKS and not event.in_parent]
    set_up = (event for event in projection.of_kind("collective") if event.name == "init_process_group")
    if any("timeout" in event.named for event in set_up):
        return
    for module in projection.machine.script.modules if events else ():
        if not any(last_name(call.func) in _LONG for call in module.index.of(ast.Call)):
            continue
        for node in module.index.of(ast.If):
            if _FIRST_RANK.search(module.excerpt(node.test, 1_000)) and not _negated(node.test):
                work = _long_work(node.body)
                waiting = _next_meeting(module, node, events) if work is not None else None
                if work is not None and waiting is not None:
                    yield LongWait(
                        what=f"the first rank {work[1]}",
                        location=module.location(work[0]),
                        condition=module.excerpt(node.test),
                        condition_location=module.location(node.test),
                        collective=waiting.name,
                        collective_location=waiting.location,
                    )


def _negated(test: ast.expr) -> bool:
    return any(
        isinstance(inner, ast.NotEq)
        or (isinstance(inner, ast.UnaryOp) and isinstance(inner.op, ast.Not) and "main" in ast.unparse(inner.operand))
        for inner in descend(test)
    )


def _long_work(body: Sequence[ast.stmt]) -> tuple[ast.Call, str] | None:
    """Return a call that takes as long as there is data: ``dataset.map(...)``, or ``model.generate(...)`` in a loop."""
    for statement in body:
        for node in descend(statement):
            receiver = _receiver_of(node, "map")
            if receiver is not None and isinstance(node, ast.Call) and len(node.args) == 1:
                return node, "preprocesses a data set"
            if isinstance(node, (ast.For, ast.While, ast.ListComp)):
                for inner in descend(node):
                    if isinstance(inner, ast.Call) and _receiver_of(inner, "generate") is not None:
                        return inner, "generates for one sample after another"
    return None


def _receiver_of(node: ast.AST, method: str) -> str | None:
    """Return the source of what a method is called on; None when the node is no call of that method."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method:
        return ast.unparse(node.func.value)
    return None


def _next_meeting(module: Module, node: ast.If, events: Sequence[Event]) -> Event | None:
    """Return the collective that the others come to meanwhile: further down in the function, or in the next turn of a
    loop.
    """
    if any(events_through(events, module, node.lineno, node.end_lineno or node.lineno)):
        return None
    function = function_around(module, node)
    last = getattr(function, "end_lineno", None) or len(module.lines)
    behind = next(events_through(events, module, (node.end_lineno or node.lineno) + 1, last), None)
    if behind is not None:
        return behind
    for around in module.ancestors(node):
        if around is function:
            break
        if isinstance(around, (ast.For, ast.While)):
            return next(events_through(events, module, around.lineno, node.lineno), None)
    return None
