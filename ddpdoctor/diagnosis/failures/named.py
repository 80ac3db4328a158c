"""Exceptions whose message names their cause: what it is, and on which ranks they came."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from ddpdoctor.diagnosis.wording import location_of, site_location
from ddpdoctor.finding import Location, Trouble
from ddpdoctor.record.joining import headline
from ddpdoctor.record.model import RankException, RunRecord
from ddpdoctor.record.streams.collectives import Wait

_PATTERNS: tuple[tuple[Trouble, re.Pattern[str]], ...] = (
    ("ready-twice", re.compile(r"Expected to mark a variable ready only once")),
    ("port-in-use", re.compile(r"EADDRINUSE|server socket has failed to (listen|bind)", re.IGNORECASE)),
    ("shared-memory", re.compile(r"insufficient shared memory|killed by signal: Bus error", re.IGNORECASE)),
    ("cuda-after-fork", re.compile(r"Cannot re-initialize CUDA in forked subprocess")),
    ("missing-device", re.compile(r"deserialize object on (a )?CUDA device")),
    (
        "out-of-memory",
        re.compile(r"out of memory|can't allocate memory|not enough memory: you tried|Unable to allocate"),
    ),
    (
        "nccl-error",
        re.compile(r"nccl(UnhandledCuda|System|Internal)Error|ncclInvalid(Argument|Usage)|NCCL error", re.IGNORECASE),
    ),
    ("cpu-tensor", re.compile(r"No backend type associated with device type cpu|Tensors must be CUDA and dense")),
)
"""The messages of torch that say what is wrong, whatever the script was about to do."""


_OUT_OF_MEMORY = frozenset({"MemoryError", "OutOfMemoryError"})


class NamedFailure(msgspec.Struct, frozen=True, kw_only=True):
    """One exception that several ranks raised at one line, or one of them alone."""

    type: str
    message: str
    """Its first line."""
    location: Location | None
    ranks: tuple[int, ...]


def trouble_of(raised: RankException) -> Trouble | None:
    """Return what an exception says went wrong; None when its message does not name its cause."""
    if raised.attribute_owner:
        return "wrapper-attribute"
    if raised.type in _OUT_OF_MEMORY:
        return "out-of-memory"
    return next((trouble for trouble, pattern in _PATTERNS if pattern.search(raised.message)), None)


def named_failures(record: RunRecord, trouble: Trouble | None) -> Iterator[NamedFailure]:
    """Yield the exceptions that ended ranks and say this of what went wrong, once a line."""
    found: dict[tuple[str, Location | None], list[tuple[int, RankException]]] = {}
    for rank in record.ranks:
        for raised in rank.exceptions:
            if trouble_of(raised) == trouble and not raised.communication:
                place = location_of(raised.frames[0]) if raised.frames else None
                found.setdefault((raised.type, place), []).append((rank.rank, raised))
    for (kind, place), entries in found.items():
        yield NamedFailure(
            type=kind,
            message=_shortened(headline(entries[0][1])),
            location=place,
            ranks=tuple(sorted({rank for rank, _ in entries})),
        )


def failed_initialisations(record: RunRecord) -> Iterator[tuple[Wait, Location | None]]:
    """Yield the calls of ``init_process_group`` that failed, one for each line, where no later call did better."""
    said: set[tuple[int, str]] = set()
    for position, wait in enumerate(record.waits):
        if wait.kind != "init_process_group" or not wait.error or (wait.site, wait.error) in said:
            continue
        later = record.waits[position + 1 :]
        if any(_succeeded(other) and other.rank in (wait.rank, -1) for other in later):
            continue
        said.add((wait.site, wait.error))
        yield wait, site_location(record.site(wait.site))


def _succeeded(wait: Wait) -> bool:
    return wait.kind == "init_process_group" and wait.ended_ns > 0 and not wait.error


def _shortened(line: str) -> str:
    return line if len(line) <= 200 else f"{line[:200]}..."
