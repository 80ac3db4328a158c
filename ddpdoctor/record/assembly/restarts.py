"""Tells which of several processes that say to be one rank is it: ranks are started again, directories used twice."""

from __future__ import annotations

from collections.abc import Callable, Set

from ddpdoctor.record.assembly.ranks import RankBook


def superseded(
    book: RankBook,
    rivals: Set[int] = frozenset(),
    beat_ns: Callable[[int], int] = lambda pid: 0,
    is_alive: Callable[[int], bool] = lambda pid: False,
) -> frozenset[int]:
    """Processes in whose place others are ranks now, and those that work for them.

    The newest process is the rank; but one that a rank in a process group has started itself takes no place, nor does
    one of the launchers in ``rivals``. ``beat_ns`` tells when a process gave its last sign of life.
    """
    claims = _claims(book)
    dropped = {pid for pids in claims.values() for pid in pids if book.processes[pid].parent in rivals}
    dropped |= _started_anew(book, beat_ns, is_alive)
    for pids in claims.values():
        kept = _newest(book, [pid for pid in pids if pid not in dropped] or pids)
        dropped.update(pid for pid in pids if pid != kept)
    served = {pid for pid in book.processes if not dropped.isdisjoint(ancestors(book, pid))}
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


def starts_of(book: RankBook) -> tuple[frozenset[int], ...]:
    """Return the processes of each set of ranks that a script has started one after the other, first in time first.

    A set begins with the first process that is a rank which an earlier one was that had ended. Processes of no rank,
    such as the script that starts them, belong to every set and are in none.
    """
    claims = [(entry.started_ns, pid) for pid, entry in book.processes.items() if entry.rank is not None]
    starts: list[dict[int | None, int]] = []
    for started_ns, pid in sorted(claims):
        rank = book.processes[pid].rank
        before = starts[-1].get(rank) if starts else None
        if not starts or (before is not None and 0 < _ended_ns(book, before) <= started_ns):
            starts.append({})
        starts[-1].setdefault(rank, pid)
    homes = {pid: number for number, pids in enumerate(starts) for pid in pids.values()}
    found: list[set[int]] = [set() for _ in starts]
    for pid in book.processes:
        home = next((homes[one] for one in (pid, *ancestors(book, pid)) if one in homes), None)
        if home is not None:
            found[home].add(pid)
    return tuple(map(frozenset, found))


def rival_launchers(book: RankBook, is_alive: Callable[[int], bool]) -> frozenset[int]:
    """Launchers of jobs that run beside a newer one: a rank of theirs lives while another launcher has started it anew.

    A launcher that starts its ranks again has seen the old ones end.
    """
    rivals = set()
    for pids in _claims(book).values():
        newest = _newest(book, pids)
        own = {newest, book.processes[newest].parent, *ancestors(book, newest)}
        for pid in pids:
            parent = book.processes[pid].parent
            if parent not in own and pid not in own and not _serves_a_rank(book, pid) and is_alive(pid):
                rivals.add(parent)
    return frozenset(rivals)


def _started_anew(book: RankBook, beat_ns: Callable[[int], int], is_alive: Callable[[int], bool]) -> set[int]:
    """Processes that were gone when their launcher started another one in their place, perhaps as another rank.

    An elastic job whose nodes change counts its ranks anew, and there may be fewer of them. One that lives was not
    replaced: ranks that a shell starts beside each other may all have the local rank 0.
    """
    places: dict[tuple[int, int], list[int]] = {}
    for pid, entry in book.processes.items():
        if entry.rank is not None and entry.place is not None and not _serves_a_rank(book, pid):
            places.setdefault((entry.parent, entry.place), []).append(pid)
    dropped: set[int] = set()
    for pids in places.values():
        newest_ns = max(_started_ns(book, pid) for pid in pids)
        older = [pid for pid in pids if book.processes[pid].newest_event_ns < newest_ns]
        dropped.update(pid for pid in older if beat_ns(pid) < newest_ns and not is_alive(pid))
    return dropped


def _claims(book: RankBook) -> dict[int, list[int]]:
    """Return the processes that say to be a rank, by rank."""
    claims: dict[int, list[int]] = {}
    for pid, entry in book.processes.items():
        if entry.rank is not None:
            claims.setdefault(entry.rank, []).append(pid)
    return claims


def _newest(book: RankBook, pids: list[int]) -> int:
    return max(pids, key=lambda pid: (not _serves_a_rank(book, pid), _started_ns(book, pid)))


def _started_ns(book: RankBook, pid: int) -> int:
    return book.processes[pid].started_ns


def _ended_ns(book: RankBook, pid: int) -> int:
    entry = book.processes[pid]
    ends = (entry.exit, entry.os_exit)
    return min((one.time_ns for one in ends if one is not None), default=entry.gone_ns)


def _serves_a_rank(book: RankBook, pid: int) -> bool:
    return any(ancestor in book.worlds for ancestor in ancestors(book, pid))


def ancestors(book: RankBook, pid: int) -> list[int]:
    """Return the processes above one, as far as they are known."""
    found: list[int] = []
    left = [pid]
    while left:
        entry = book.processes.get(left.pop())
        above = () if entry is None else (entry.parent, entry.owner)
        new = [one for one in above if one and one not in (*found, pid)]
        found += new
        left += new
    return found
