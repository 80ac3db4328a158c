"""Tells which of several processes that say to be one rank is it: ranks are started again, directories used twice."""

from __future__ import annotations

from ddpdoctor.record.assembly.ranks import RankBook


def superseded(book: RankBook) -> frozenset[int]:
    """Processes in whose place others are ranks now, and those that work for them.

    The newest process is the rank; but one that a rank in a process group has started itself takes no place.
    """
    claims: dict[int, list[int]] = {}
    for pid, entry in book.processes.items():
        if entry.rank is not None:
            claims.setdefault(entry.rank, []).append(pid)
    dropped: set[int] = set()
    for pids in claims.values():
        kept = max(pids, key=lambda pid: (not _serves_a_rank(book, pid), _started_ns(book, pid)))
        dropped.update(pid for pid in pids if pid != kept)
    served = {pid for pid in book.processes if not dropped.isdisjoint(_ancestors(book, pid))}
    kept_ranks = {pid for pids in claims.values() for pid in pids if pid not in dropped}
    return frozenset(dropped | (served - kept_ranks))


def second_claims(book: RankBook) -> frozenset[int]:
    """Processes that took the number of a rank which another process had already."""
    first: dict[int, int] = {}
    for pid, entry in book.processes.items():
        if entry.rank is not None:
            first.setdefault(entry.rank, pid)
    return frozenset(
        pid for pid, entry in book.processes.items() if entry.rank is not None and first[entry.rank] != pid
    )


def _started_ns(book: RankBook, pid: int) -> int:
    return book.processes[pid].started_ns


def _serves_a_rank(book: RankBook, pid: int) -> bool:
    return any(ancestor in book.worlds for ancestor in _ancestors(book, pid))


def _ancestors(book: RankBook, pid: int) -> list[int]:
    """The processes above one, as far as they are known."""
    found: list[int] = []
    entry = book.processes.get(pid)
    while entry is not None and entry.parent not in (*found, pid):
        found.append(entry.parent)
        entry = book.processes.get(entry.parent)
    return found
