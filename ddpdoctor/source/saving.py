"""Checkpoints that several ranks write under one path."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Literal

import msgspec

from ddpdoctor.source.projection import Projection
from ddpdoctor.source.ranks import LOCAL_RANK, numbers_in
from ddpdoctor.source.trace import Event, Guard
from ddpdoctor.source.values import Built, Const, Lanes, Unknown, Value, is_varying, options_of
from ddpdoctor.source.vocabulary import speaks_of_ranks

_IN_MEMORY = ("io.", "tempfile.")


class SharedSave(msgspec.Struct, frozen=True, eq=False):
    """A ``torch.save`` that several ranks reach with the same path."""

    event: Event
    by: Literal["all", "local-rank"]
    """Every rank writes, or the first rank of every node, because the local rank decides."""
    path: str
    """Source of the path argument."""
    guard: Guard | None
    """The test of the local rank."""


def shared_saves(projection: Projection) -> Iterator[SharedSave]:
    """Saves of a distributed job to one path from more than one rank, with no hint of a rank test around them."""
    if not is_distributed(projection):
        return
    seen: set[ast.AST] = set()
    for event in projection.in_course("save"):
        if event.node in seen:
            continue
        path = event.argument("f", 1)
        ranks = numbers_in(event.ranks)
        if path is None or len(ranks) < 2 or not is_one_path(path):
            continue
        if any(speaks_of_ranks(condition) for condition in event.conditions):
            continue
        guard = _local_guard(event)
        seen.add(event.node)
        if guard is not None:
            yield SharedSave(event, "local-rank", _path_text(event), guard)
        elif not event.guards:
            yield SharedSave(event, "all", _path_text(event), None)


def is_distributed(projection: Projection) -> bool:
    """Tell whether a script joins a process group or wraps a model in DDP in its ranks."""
    if any(projection.of_kind("wrap")):
        return True
    return any(event.name == "init_process_group" for event in projection.of_kind("collective"))


def is_one_path(path: Value) -> bool:
    """Tell whether a path is certainly the same on every rank and names a file."""
    for option in options_of(path):
        if is_varying(option) or (isinstance(option, Unknown) and option.opaque):
            return False
        if isinstance(option, Built) and option.name.startswith(_IN_MEMORY):
            return False
    return not is_varying(path)


def _local_guard(event: Event) -> Guard | None:
    """The test that lets through the first rank of every node, and nothing else."""
    if numbers_in(event.ranks) != tuple(rank for rank, local in enumerate(LOCAL_RANK) if local == 0):
        return None
    for guard in reversed(event.guards):
        if numbers_in(guard.arm) == numbers_in(event.ranks) and isinstance(guard.value, Lanes):
            outside = [value for rank, value in enumerate(guard.value.values) if not guard.arm >> rank & 1]
            if all(isinstance(value, Const) for value in outside):
                return guard
    return None


def _path_text(event: Event) -> str:
    arguments = getattr(event.node, "args", [])
    if len(arguments) > 1:
        return event.module.excerpt(arguments[1], 60)
    named = next((keyword.value for keyword in getattr(event.node, "keywords", []) if keyword.arg == "f"), None)
    return event.module.excerpt(named, 60) if named is not None else "the same path"
