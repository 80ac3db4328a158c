"""Which moments of one rank certainly come before which moments of another: the order that collectives make."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from functools import cached_property

import msgspec

from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.collectives import CollectiveTrack
from ddpdoctor.record.streams.waits import Wait

_FROM_ROOT = frozenset({"broadcast", "scatter"})
_TO_ROOT = frozenset({"reduce", "gather"})
_RECEIVES = frozenset({"recv", "recv_any_source"})
_MEETINGS = ("init_process_group", "new_group")


class Handover(msgspec.Struct, frozen=True, kw_only=True):
    """One rank saw what another had done, without a collective: it waited for a file."""

    from_rank: int
    from_ns: int
    to_rank: int
    to_ns: int


class Order:
    """Answers for one record; what one moment is followed by is worked out once."""

    def __init__(self, record: RunRecord, handovers: tuple[Handover, ...] = ()) -> None:
        self._record = record
        self._handovers = handovers
        self._tracks: Mapping[int, CollectiveTrack] = {track.rank: track for track in record.collectives}
        self._meetings: dict[tuple[str, int], dict[int, Wait]] = {}
        counts: dict[tuple[int, str], int] = {}
        for wait in record.waits:
            if wait.kind in _MEETINGS and not wait.error and not wait.ranks:
                ordinal = counts.get((wait.rank, wait.kind), 0)
                counts[wait.rank, wait.kind] = ordinal + 1
                self._meetings.setdefault((wait.kind, ordinal), {})[wait.rank] = wait
        self._known: dict[tuple[int, int, int], dict[int, int]] = {}

    @cached_property
    def _rows(self) -> dict[tuple[int, int], list[int]]:
        """(rank, group) -> rows of its track, ascending."""
        found: dict[tuple[int, int], list[int]] = {}
        for track in self._record.collectives:
            for row, group in enumerate(track.group):
                found.setdefault((track.rank, group), []).append(row)
        return found

    def follows(self, rank: int, time_ns: int, other: int, other_ns: int) -> bool:
        """Return whether the moment of ``other`` certainly comes after that of ``rank``."""
        reached = self._reached(rank, time_ns).get(other)
        return reached is not None and reached <= other_ns

    def unordered(self, rank: int, time_ns: int, other: int, other_ns: int) -> bool:
        """Return whether nothing orders two moments of two ranks."""
        return not self.follows(rank, time_ns, other, other_ns) and not self.follows(other, other_ns, rank, time_ns)

    def _reached(self, rank: int, time_ns: int) -> dict[int, int]:
        """Return the earliest time at which each rank has come past the moment, by way of what the ranks did
        together.
        """
        track = self._tracks.get(rank)
        row = bisect_left(track.started_ns, time_ns) if track is not None else 0
        later = sum(handover.from_ns >= time_ns for handover in self._handovers if handover.from_rank == rank)
        begun = sum(wait.started_ns >= time_ns for wait in self._record.waits if wait.rank == rank)
        key = (rank, row, later * (len(self._record.waits) + 1) + begun)
        if key not in self._known:
            self._known[key] = self._spread({rank: time_ns})
        return self._known[key]

    def _spread(self, reached: dict[int, int]) -> dict[int, int]:
        changed = True
        while changed:
            before = dict(reached)
            for rank, time_ns in before.items():
                self._over_collectives(rank, time_ns, reached)
                for meeting in self._meetings.values():
                    own = meeting.get(rank)
                    if own is not None and own.started_ns >= time_ns:
                        for other, wait in meeting.items():
                            if wait.ended_ns:
                                _earlier(reached, other, wait.ended_ns)
                for handover in self._handovers:
                    if handover.from_rank == rank and handover.from_ns >= time_ns:
                        _earlier(reached, handover.to_rank, handover.to_ns)
            changed = reached != before
        return reached

    def _over_collectives(self, rank: int, time_ns: int, reached: dict[int, int]) -> None:
        track = self._tracks.get(rank)
        if track is None:
            return
        for (owner, group), rows in self._rows.items():
            if owner != rank:
                continue
            left = set(self._record.groups[group].ranks) - {rank}
            position = bisect_left([track.started_ns[row] for row in rows], time_ns)
            for row in rows[position:]:
                if not left:
                    break
                left -= self._carried(track, row, group, left, reached)

    def _carried(
        self, track: CollectiveTrack, row: int, group: int, left: set[int], reached: dict[int, int]
    ) -> set[int]:
        """Return the ranks that come past a collective only after this rank has reached it."""
        signature = self._record.signatures[track.signature[row]]
        if signature.kind == "send":
            return self._received(track.started_ns[row], group, left, reached)
        if signature.kind in _RECEIVES or (signature.kind in _FROM_ROOT and signature.root != track.rank):
            return set()
        carried = left & {signature.root} if signature.kind in _TO_ROOT else set(left)
        found: set[int] = set()
        for other in carried:
            if other is None:
                continue
            rows, position = self._rows.get((other, group), []), track.sequence[row]
            theirs = self._tracks.get(other)
            if theirs is not None and position < len(rows):
                _earlier(reached, other, theirs.started_ns[rows[position]])
            found.add(other)
        return found

    def _received(self, sent_ns: int, group: int, left: set[int], reached: dict[int, int]) -> set[int]:
        """Return the ranks that may have received what was sent: whom it was for is not recorded."""
        found = set()
        for other in left:
            for row in self._rows.get((other, group), ()):
                track = self._tracks[other]
                kind = self._record.signatures[track.signature[row]].kind
                if kind in _RECEIVES and not 0 < track.completed_ns[row] < sent_ns:
                    _earlier(reached, other, max(track.started_ns[row], sent_ns))
                    found.add(other)
                    break
        return found


def _earlier(reached: dict[int, int], rank: int, time_ns: int) -> None:
    reached[rank] = min(reached.get(rank, time_ns), time_ns)
