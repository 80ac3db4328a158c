"""Exception handlers that let one rank continue without its peers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

import msgspec

from ddpdoctor.finding import Location
from ddpdoctor.source.events import Event
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.sync_points import events_through, function_around, reported_lines, sync_events
from ddpdoctor.source.script.module import Module
from ddpdoctor.source.script.syntax_index import descend, last_name

_LOCAL_FAILURES = frozenset(
    {
        "Exception",
        "BaseException",
        "RuntimeError",
        "OutOfMemoryError",
        "ValueError",
        "FloatingPointError",
        "ArithmeticError",
        "AssertionError",
        "OSError",
        "IOError",
    }
)
"""Exceptions that data or memory can raise on one rank alone."""
_SETTING_UP = frozenset({"init_process_group", "new_group"})
_ENDS = re.compile(r"exit|quit$|abort|kill|terminate|shutdown|destroy|fatal|fail", re.IGNORECASE)
_FETCHES = frozenset({"next", "anext"})


class Swallowed(msgspec.Struct, frozen=True, kw_only=True):
    """A handler after which a rank continues."""

    location: Location
    """The ``except`` line."""
    caught: str
    """Source of what is caught."""
    collective: str
    """The collective that the failing rank misses."""
    collective_location: Location


def swallowed(projection: Projection) -> Iterator[Swallowed]:
    """Handlers of failures that may hit one rank alone, which skip a collective and continue."""
    events = [event for event in sync_events(projection) if event.name not in _SETTING_UP and not event.in_parent]
    told = reported_lines(projection)
    for module in projection.machine.script.modules if events else ():
        for node in module.index.of(ast.Try):
            if node.handlers:
                missed = _missed(module, node, events)
                if missed is None or (str(missed.module.path), getattr(missed.node, "lineno", 0)) in told:
                    continue
                for handler in node.handlers:
                    if _swallows(module, handler, events) and not _makes_up_for(handler, missed):
                        yield Swallowed(
                            location=module.head_location(handler),
                            caught=ast.unparse(handler.type) if handler.type is not None else "everything",
                            collective=missed.name,
                            collective_location=missed.module.location(missed.node),
                        )


def _swallows(module: Module, handler: ast.ExceptHandler, events: Sequence[Event]) -> bool:
    """Return whether a rank continues after a failure of its own without notifying the others."""
    if not _catches_local_failures(handler) or _ends(handler.body):
        return False
    return not any(events_through(events, module, handler.lineno, handler.end_lineno or handler.lineno))


def _makes_up_for(handler: ast.ExceptHandler, missed: Event) -> bool:
    """Return whether a handler calls again what was missed: ``loss.mean().backward()`` where there are many losses."""
    name = last_name(missed.node.func) if isinstance(missed.node, ast.Call) else ""
    calls = (node for statement in handler.body for node in descend(statement) if isinstance(node, ast.Call))
    return bool(name) and any(last_name(call.func) == name for call in calls)


def _missed(module: Module, node: ast.Try, events: Sequence[Event]) -> Event | None:
    """Return the collective that a failure in the body skips, when more of them follow."""
    first, last = node.body[0].lineno, node.body[-1].end_lineno or node.body[-1].lineno
    inside = list(events_through(events, module, first, last))
    loop = _loop_around(module, node)
    if inside and _only_calls(node.body, inside):
        return None
    if inside:
        later = any(event.ordinal > inside[-1].ordinal for event in events if event.scopes[:1] == inside[-1].scopes[:1])
        return inside[0] if loop is not None or later else None
    if loop is None or _only_fetches(node.body):
        return None
    leaving = {type(handler.body[-1]) for handler in node.handlers}
    if leaving & {ast.Continue, ast.Break}:
        behind = next(events_through(events, module, last + 1, loop.end_lineno or last), None)
        if behind is not None:
            return behind
    if leaving & {ast.Break, ast.Return}:  # The next turns are missed whole.
        return next(events_through(events, module, loop.body[0].lineno, node.lineno), None)
    return None


def _only_calls(body: Sequence[ast.stmt], inside: Sequence[Event]) -> bool:
    """Return whether nothing but a collective can fail there, which fails on every rank: a probe, or a barrier that
    counts.
    """
    nodes = {event.node for event in inside if event.kind == "collective"}
    calls = [inner for statement in body for inner in descend(statement) if isinstance(inner, ast.Call)]
    others = [call for call in calls if call not in nodes and not any(_stands_in(call, node) for node in nodes)]
    return any(call in nodes for call in calls) and all(_makes_tensor(call) for call in others)


def _stands_in(call: ast.Call, node: ast.AST) -> bool:
    return any(inner is call for inner in descend(node))


def _makes_tensor(call: ast.Call) -> bool:
    text = ast.unparse(call.func)
    return text.startswith("torch.") or text.endswith((".cuda", ".to", ".wait", ".detach", ".clone"))


def _loop_around(module: Module, node: ast.Try) -> ast.For | ast.While | None:
    function = function_around(module, node)
    for around in module.ancestors(node):
        if around is function:
            return None
        if isinstance(around, (ast.For, ast.While)):
            return around
    return None


def _only_fetches(body: Sequence[ast.stmt]) -> bool:
    calls = [inner for statement in body for inner in descend(statement) if isinstance(inner, ast.Call)]
    return not calls or any(isinstance(call.func, ast.Name) and call.func.id in _FETCHES for call in calls)


def _catches_local_failures(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(ast.unparse(entry).rpartition(".")[2] in _LOCAL_FAILURES for entry in types)


def _goes_on(arm: Sequence[ast.stmt]) -> bool:
    """Return whether one arm of a condition leaves the handler silently."""
    return bool(arm) and isinstance(arm[-1], (ast.Continue, ast.Break, ast.Return)) and not _ends(arm)


def _ends(body: Sequence[ast.stmt]) -> bool:
    """Return whether a handler ends the rank, so that its peers learn of it."""
    for statement in body:
        if isinstance(statement, ast.Raise):
            return True
        if isinstance(statement, ast.If) and any(map(_goes_on, (statement.body, statement.orelse))):
            return False
        if isinstance(statement, ast.If) and statement.orelse and _ends(statement.body) and _ends(statement.orelse):
            return True
        is_call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
        if is_call and _ENDS.search(ast.unparse(statement).partition("(")[0]):
            return True
    return False
