"""Tells of each stream of a record whether it holds all that happened."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Set
from pathlib import Path
from typing import Any

import msgspec

from ddpdoctor.files.untrusted import read_untrusted
from ddpdoctor.record import events
from ddpdoctor.record.assembly.live import LiveRings
from ddpdoctor.record.assembly.ranks import RankBook
from ddpdoctor.record.events import Row
from ddpdoctor.record.model import STREAMS, RunKind, StreamState, shared_fields
from ddpdoctor.record.reader import RunFiles
from ddpdoctor.record.streams.training import Loader, Pass, SampleProbe

# Tells which of several processes that say to be one rank is it: ranks are started again, directories used twice.


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
    return frozenset(pid for pids in _claims(book).values() for pid in pids[1:])


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
        newest_ns = max(book.processes[pid].started_ns for pid in pids)
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
    return max(pids, key=lambda pid: (not _serves_a_rank(book, pid), book.processes[pid].started_ns))


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


# Makes the streams of loaders and of passes over them of what the ranks wrote about them.

_MOST_INDEX_BYTES = 1 << 26
"""Of all passes together, 8 an index: a number of Python has 32."""


class PassRows:
    """Takes in the events of one run."""

    def __init__(
        self,
        directory: Path,
        rank_of: Callable[[int], int | None],
        converted: Callable[[int, Row, type[Any]], Any],
    ) -> None:
        """``rank_of``: the rank that a process is or works for."""
        self._directory = directory
        self._rank_of = rank_of
        self._converted = converted
        self.rows: dict[tuple[int, int], Pass] = {}
        """By process and number there."""
        self._index_bytes_left = _MOST_INDEX_BYTES
        self._samples: list[tuple[tuple[int, str, int | None], SampleProbe]] = []

    def with_samples(self, loaders: Iterable[Loader]) -> tuple[Loader, ...]:
        """Loaders with the samples of their data set, which is known by type and length."""
        # A damaged directory may hold 10,000 loaders of one rank: their samples are gathered once, not for each.
        known: dict[tuple[int, str, int | None], dict[int, SampleProbe]] = {}
        for data_set, probe in self._samples:
            known.setdefault(data_set, {}).setdefault(probe.index, probe)
        samples = {of: tuple(probes.values()) for of, probes in known.items()}
        rows = [(loader, (loader.rank, loader.dataset_type, loader.dataset_length)) for loader in loaders]
        return tuple(msgspec.structs.replace(loader, samples=samples.get(of, ())) for loader, of in rows)

    def on_sample(self, pid: int, event: events.DatasetSample) -> None:
        """Take in a sample of a data set."""
        rank = self._rank_of(pid)
        if rank is not None:
            probe = SampleProbe(index=event.index, leaves=event.leaves)
            self._samples.append(((rank, event.dataset_type, event.dataset_length), probe))

    def on_begun(self, pid: int, event: Row) -> None:
        """Take in that a pass has begun."""
        self.rows[pid, event.fields["number"]] = self._converted(pid, event, Pass)

    def on_ended(self, pid: int, event: events.PassEnded) -> None:
        """Take in that a pass is over."""
        told = shared_fields(event, Pass) | {"ended_ns": event.time_ns, "indices": self._indices(event.indices)}
        self.rows[pid, event.number] = msgspec.structs.replace(self.rows[pid, event.number], **told)

    def on_trained(self, pid: int, event: events.PassTrained) -> None:
        """Take in a backward that came after the end of its pass."""
        key = (pid, event.number)
        self.rows[key] = msgspec.structs.replace(self.rows[key], backwards=event.backwards)

    def on_progress(self, pid: int, event: events.PassProgress) -> None:
        """Take in how far a pass has come."""
        key = (pid, event.number)
        if self.rows[key].end == "open":
            self.rows[key] = msgspec.structs.replace(self.rows[key], **shared_fields(event, Pass))

    def _indices(self, name: str) -> tuple[int, ...]:
        if not name.startswith("indices-") or "/" in name:
            return ()
        column = array("q")
        try:
            content = read_untrusted(self._directory / name, self._index_bytes_left, self._directory)
            column.frombytes(content)
        except (OSError, ValueError):
            return ()
        self._index_bytes_left -= len(content)
        return tuple(column)


_MEASURED = (
    "step_tracks", "call_tracks", "bucket_layouts", "gauges", "host_reads", "looks", "unused_searches",
    "unfollowed_forwards", "replica_digests",
)  # fmt: skip
_LIVE = (
    *("ranks", "groups", "waits", "wraps", "loaders", "passes", "files", "stacks", "settings", "optimizer_sizes"),
    "nonfinites",
    *_MEASURED,
)
"""What a live run records in full …"""
_ONLY_LIVE = (*_MEASURED, "gpus", "host_uses")
"""… and what nothing else does."""


class Completeness:
    """What is known to be missing from the record of one run."""

    def __init__(self, files: RunFiles, book: RankBook, live: LiveRings) -> None:
        self._files = files
        self._book = book
        self._live = live
        self._harmed: dict[str, str] = {}
        """Streams that lack something because of a fault, and which."""
        self._lost: dict[int, int] = {}
        """Events that a process could not write."""
        self._unread = False
        """An event was there and could not be read."""

    @property
    def has_gaps(self) -> bool:
        """Of a live run something is missing in its midst: what a rank is not known to have called it may have."""
        return self._unread or bool(self._missing_events()) or bool(self._live.missing())

    def unread(self, fault: str) -> None:
        """An event was there and could not be read: it may have been of any stream."""
        self._unread = True
        self.part_failed(fault, STREAMS)

    def part_failed(self, fault: str, harms: Iterable[str]) -> None:
        """A part of the probe has failed, so that the streams that it writes lack something."""
        for name in harms:
            self._harmed.setdefault(name, fault)

    def lost(self, pid: int, events: int) -> None:
        """A process says how many events it could not write."""
        self._lost[pid] = max(self._lost.get(pid, 0), events)

    def states(self, lines: StreamState, kind: RunKind) -> dict[str, StreamState]:
        """Return the state of every stream, given that of the lines."""
        if kind == "run":
            states = self._live_states()
        else:
            states = {name: StreamState("complete") for name in STREAMS} | {"lines": lines}
            states |= dict.fromkeys(_ONLY_LIVE, StreamState("absent", "a rehearsal does not measure"))
            states |= self._collective_states()
        if not self._book.worlds:
            for name in ("collectives", "wraps", "forwards", "backwards", "step_tracks", "call_tracks"):
                states[name] = StreamState("absent", "no rank initialised a process group")
        harmed = dict.fromkeys(states, self._missing_events()) | {
            name: f"part of the observation failed: {fault}" for name, fault in self._harmed.items()
        }
        for name, reason in harmed.items():
            if reason and states[name].state == "complete":
                states[name] = StreamState("truncated", reason)
        return states

    def _collective_states(self) -> dict[str, StreamState]:
        """Return the state of the log of collectives of a rehearsal, where it is not complete."""
        states: dict[str, StreamState] = {}
        if self._files.refused:
            states["collectives"] = StreamState("truncated", next(iter(self._files.refused.values())))
        if any(ring.dropped > ring.missing for ring in self._files.rings.values()):
            states["collectives"] = StreamState("truncated", "the ring of collectives overflowed")
        if missing := sum(ring.missing for ring in self._files.rings.values()):
            reason = f"{missing:,} collectives are missing: another program truncated or overwrote the record"
            states["collectives"] = StreamState("truncated", reason)
        silent = self._book.worlds.keys() - self._files.rings.keys() - self._files.refused.keys()
        unlogged = [rank for rank in map(self._book.rank_of, silent) if rank is not None]
        if unlogged:
            states["collectives"] = StreamState("absent", f"rank {min(unlogged)} could not write its log")
        return states

    def _live_states(self) -> dict[str, StreamState]:
        """Return the state of every stream of a live run."""
        states = {name: StreamState("absent", "a live run does not record them") for name in STREAMS}
        states |= dict.fromkeys(_LIVE, StreamState("complete"))
        backends = {backend for _, backend in self._book.worlds.values()}
        if reason := next(iter(self._live.refused.values()), ""):
            states |= dict.fromkeys(("step_tracks", "call_tracks"), StreamState("truncated", reason))
        states |= dict.fromkeys(("forwards", "buffers"), StreamState("truncated", "a live run records the first few"))
        if self._live.collectives():
            states["collectives"] = StreamState("truncated", "torch's flight recorder holds the newest ones only")
        elif (lack := self._live.lacks.get("_dump_fr_trace")) and "gloo" in backends:
            states["collectives"] = StreamState("absent", lack)
        elif self._book.any_ended() and any(map(len, self._live.call_tracks())):
            states["collectives"] = StreamState("truncated", "the ranks ended before torch's flight recorder was read")
        return states

    def _missing_events(self) -> str:
        """Say why the events are not all there; empty when they are."""
        for pid, ring in self._files.rings.items():
            self.lost(pid, ring.heartbeat().lost_events)
        for pid, count in self._live.lost_events().items():
            self.lost(pid, count)
        if lost := sum(self._lost.values()):
            return f"{lost:,} events could not be written"
        if self._files.shortened:
            return "another program truncated the record"
        if unread := self._files.unread:
            return unread[0]
        damaged = self._files.damaged_lines
        return f"{damaged:,} lines of the record were damaged" if damaged else ""
