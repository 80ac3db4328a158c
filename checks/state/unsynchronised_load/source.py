"""Files that one rank writes and others read at once, without waiting for it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache

import msgspec

from ddpdoctor.checks.state.shared.loads_source import may_be_one_path
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import ALL_RANKS, constant
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.files import FileUse, reads, writes
from ddpdoctor.source.queries.job_kind import is_distributed

_WAITS = re.compile(r"barrier|synchron|wait_for|wait_all|sync_proc", re.IGNORECASE)


class EarlyLoad(msgspec.Struct, frozen=True, eq=False):
    """A read of a file that one rank has just begun to write."""

    load: Event
    save: Event
    path: str
    """Source of the path."""


def early_loads(projection: Projection) -> Iterator[EarlyLoad]:
    """Reads on ranks that do not wait for the rank that writes the same path before."""
    if not is_distributed(projection):
        return
    saves = [use for use in writes(projection) if _by_one(use.event.ranks)]
    if not saves or _waits_somewhere_unknown(projection):
        return
    waits = list(projection.in_course("collective", "wrap", "forward", "backward"))
    seen: set[ast.AST] = set()
    for load in reads(projection):
        if load.event.node in seen or not may_be_one_path(load.event, load.path):
            continue
        for save in reversed(saves):
            if not load.event.ranks & ~save.event.ranks:
                continue  # Each reader wrote it before, and waits for itself alone.
            if save.event.ordinal < load.event.ordinal and save.event.root == load.event.root and _same(save, load):
                if not any(_is_between(save.event, wait, load.event) for wait in waits):
                    seen.add(load.event.node)
                    yield EarlyLoad(load.event, save.event, load.source)
                break


def _by_one(ranks: int) -> bool:
    """Return whether one rank writes: the first of the job, or of every node."""
    return not ranks & (ranks - 1) or ranks == 0b0101


def _same(save: FileUse, load: FileUse) -> bool:
    one, other = save.path, load.path
    if isinstance(constant(one), str) or isinstance(constant(other), str):
        return constant(one) == constant(other)
    return one == other and save.event.scopes == load.event.scopes and save.source == load.source


def _is_between(save: Event, wait: Event, load: Event) -> bool:
    return save.ordinal < wait.ordinal < load.ordinal and wait.ranks == ALL_RANKS


@lru_cache(maxsize=16_384)
def _promises_to_wait(name: str) -> bool:
    return _WAITS.search(name) is not None


def _waits_somewhere_unknown(projection: Projection) -> bool:
    """Return whether something is called by a name that promises to wait, and was not seen to be a collective."""
    known = {event.node for event in projection.events if event.kind == "collective"}
    for module in projection.machine.script.modules:
        for last, calls in module.calls_by_name.items():
            if not _promises_to_wait(last) or last in projection.machine.mentions.synchronising:
                continue
            if any(node not in known and not module.resolve(node.func).startswith("torch.") for node in calls):
                return True
    return False
