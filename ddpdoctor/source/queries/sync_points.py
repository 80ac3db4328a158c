"""The collectives of a script that every rank has to come to, and the lines that lead to them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from ddpdoctor.source.events import Event, events_in
from ddpdoctor.source.interpreter.values import ALL_RANKS
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.divergence import partings
from ddpdoctor.source.script.module import Module
from ddpdoctor.source.script.syntax_index import children_of, descend, last_name

BARRIERS = frozenset({"barrier", "monitored_barrier", "wait_for_everyone"})
_CLOSED = frozenset({ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.Name, ast.Constant})
"""Classes of nodes that are not looked into: what is in them runs at another time, or there is nothing."""


def sync_events(projection: Projection) -> tuple[Event, ...]:
    """Return everything in the script that synchronises the ranks, once each, in the order of execution."""
    found: dict[int, Event] = {}
    for walk in projection.walks:
        for tree in walk.trees:
            found.update({event.ordinal: event for event in events_in(tree)})
    return tuple(found[ordinal] for ordinal in sorted(found))


def is_in_turns(projection: Projection, event: Event) -> bool:
    """Return whether some ranks wait before an event and the others behind it, so that these go first.

    ``if rank != 0: barrier()``, what they do, ``if rank == 0: barrier()``.
    """
    waits = [one for one in projection.of_kind("collective") if one.name in BARRIERS and one.ranks != ALL_RANKS]
    before: Event | None = None
    for wait in waits:
        if before is None or before.ranks ^ wait.ranks != ALL_RANKS:
            before = wait
        elif before.ordinal < event.ordinal < wait.ordinal:
            return True
        else:
            before = None
    return False


def events_through(events: Iterable[Event], module: Module, first_line: int, last_line: int) -> Iterator[Event]:
    """Yield the events whose call chain passes some lines of a file."""
    file = str(module.path)
    for event in events:
        if any(frame.file == file and first_line <= frame.line <= last_line for frame in event.chain):
            yield event


def reported_lines(projection: Projection) -> frozenset[tuple[str, int]]:
    """Return the file and line of the collectives that a rank test keeps from some ranks; other checks skip them."""
    return frozenset((parting.location.file, parting.location.line) for parting in partings(projection))


def function_around(module: Module, node: ast.AST) -> ast.AST:
    """Return the function that a node stands in, or the module."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    return next((around for around in module.ancestors(node) if isinstance(around, functions)), module.tree)


def nodes_of(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of functions and classes in it."""
    waiting = children_of(function)
    while waiting:
        node = waiting.pop()
        yield node
        if node.__class__ not in _CLOSED:
            waiting += children_of(node)


def mentions(node: ast.AST, names: Iterable[str]) -> bool:
    """Return whether an expression holds one of some variables or dotted attributes."""
    wanted = names if isinstance(names, (set, frozenset)) else set(names)
    last = {name.rpartition(".")[2] for name in wanted}
    return any(last_name(inner) in last and ast.unparse(inner) in wanted for inner in descend(node))


def stores(node: ast.AST, name: str) -> bool:
    """Return whether a node is a variable or attribute of this name that is assigned."""
    return (
        isinstance(node, (ast.Name, ast.Attribute))
        and isinstance(node.ctx, ast.Store)
        and last_name(node) == name.rpartition(".")[2]
        and ast.unparse(node) == name
    )
