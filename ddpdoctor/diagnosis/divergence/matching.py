"""Which calls of the ranks belong together, and whether they agree."""

from __future__ import annotations

from array import array
from bisect import bisect_right, insort
from typing import Literal

import msgspec

from ddpdoctor.diagnosis.steps import once_per_record
from ddpdoctor.record.model import Rank, RunRecord
from ddpdoctor.record.streams.collectives import CollectiveTrack, Signature

POINT_TO_POINT = frozenset({"send", "recv", "isend", "irecv", "recv_any_source", "batch_isend_irecv"})
"""Kinds that pair two ranks, not a group: they take no part in the matching of sequences."""

_FAMILIES = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "all_reduce_coalesced": "all_reduce",
}
"""Spellings of one collective; between two spellings only the family is compared."""

_LEGALLY_UNEQUAL = frozenset({"gather", "scatter", "all_to_all"})
"""Families whose ranks hand in tensors of different number and size."""

_LISTS = frozenset({"all_gather", "reduce_scatter"})
"""Kinds that NCCL also serves with tensors of unequal sizes, where the list on each rank has these sizes."""


def disagreement(one: Signature, other: Signature, backend: str = "") -> str:
    """Name what differs between two ranks' collectives that must agree; empty when they fit.

    ``backend`` is the group's: NCCL serves uneven lists in all_gather and reduce_scatter.
    """
    family = _FAMILIES.get(one.kind, one.kind)
    if family != _FAMILIES.get(other.kind, other.kind):
        return "kind of collective"
    if one.kind != other.kind:
        return ""
    if one.module and other.module and one.module != other.module:
        return "sharded module"
    if one.origin != other.origin and one.origin.startswith("fsdp") and other.origin.startswith("fsdp"):
        return "phase of the sharded module"
    if family not in _LEGALLY_UNEQUAL and one.numels != other.numels and not _uneven_list(one, other, backend):
        return "number of elements"
    if one.dtype and other.dtype and one.dtype != other.dtype:
        return "dtype"
    if one.reduce_op and other.reduce_op and one.reduce_op != other.reduce_op:
        return "reduce operation"
    return "root" if one.root is not None and other.root is not None and one.root != other.root else ""


def _uneven_list(one: Signature, other: Signature, backend: str) -> bool:
    """Return whether the number of elements may differ: each rank knows the others' sizes, or that was not seen."""
    if not one.numels or not other.numels:
        return True
    if one.kind not in _LISTS:
        return False
    if one.uneven or other.uneven or len(set(one.numels)) > 1 or len(set(other.numels)) > 1:
        return True
    return "nccl" in backend and None in (one.uneven, other.uneven)


class FirstMismatch(msgspec.Struct, frozen=True, kw_only=True):
    """The first position of a group at which two ranks' collectives do not belong together."""

    form: Literal["mismatch", "desync"]
    group: int
    """Index into ``RunRecord.groups``."""
    position: int
    """Position in the lanes of the group."""
    ranks: tuple[int, int]
    """The two ranks that were compared."""
    difference: str
    """What differs: ``number of elements``, ``step``, …"""
    time_ns: int
    """When the first of the two ranks started it."""


class Lane:
    """The rows of one rank's track that belong to one group, point-to-point left out."""

    __slots__ = ("base", "rows")

    def __init__(self, base: int) -> None:
        self.base = base
        """Position of the first row; above 0 when the beginning of the track is lost."""
        self.rows = array("q")
        """Indices into the track."""

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.base + len(self.rows)

    def row(self, position: int) -> int:
        """Index into the track of what stands at a position."""
        return self.rows[position - self.base]

    def column(self, values: array[int], start: int, stop: int) -> array[int]:
        """Return the values of a track's column at the positions ``start`` to ``stop``, exclusive."""
        low, high = start - self.base, stop - self.base
        first, last = self.rows[low], self.rows[high - 1]
        if last - first == high - 1 - low:
            return values[first : last + 1]
        return array(values.typecode, [values[row] for row in self.rows[low:high]])


class Matcher:
    """How far the tracks of a job have been split and compared."""

    def __init__(self) -> None:
        self.lanes: dict[int, dict[int, Lane]] = {}
        """Group, then rank."""
        self.parting: FirstMismatch | None = None
        """The first parting in time; once found, nothing more is compared."""
        self._split: dict[int, int] = {}
        self._agreed: dict[tuple[int, int], int] = {}
        """Group and rank, to the position up to which the rank agrees with the longest lane of the last call."""
        self._fits: dict[tuple[int, int, int], str] = {}
        self._synchronised: dict[tuple[int, int], list[int]] = {}
        """Rank and call chain, to the steps of its synchronised training forwards; made when needed."""
        self._lost: set[int] = set()
        self._point_to_point: set[int] = set()
        """Groups with such entries: they may count in the sequence, so a lost beginning cannot be made up for."""
        self._joined: set[int] = set()
        """Groups in which `join()` is at work: ranks may run different numbers of steps."""

    def is_comparable(self, group: int) -> bool:
        """Return whether the ranks of a group have to reach the same number of entries."""
        return group not in self._joined and group not in self._lost

    def advance(self, record: RunRecord) -> FirstMismatch | None:
        """Take in what the tracks hold beyond the last call, and return the first parting if there is one."""
        if self.parting is not None:
            return self.parting
        ranks = {rank.rank: rank for rank in record.ranks}
        for track in record.collectives:
            self._take_in(track, record, evidence_rows(track, ranks.get(track.rank)))
        self._synchronised = {}
        found = [parting for group in self.lanes if (parting := self._compare(group, record)) is not None]
        self.parting = min(found, key=lambda parting: (parting.time_ns, parting.group), default=None)
        return self.parting

    def _take_in(self, track: CollectiveTrack, record: RunRecord, stop: int) -> None:
        start = self._split.get(track.rank, 0)
        if stop <= start:
            return
        self._split[track.rank] = stop
        groups, signatures = track.group[start:stop], track.signature[start:stop]
        joins = {index for index in set(signatures) if record.signatures[index].origin == "join"}
        if joins:
            self._joined |= {group for group, index in zip(groups, signatures, strict=True) if index in joins}
        point_to_point = {index for index in set(signatures) if record.signatures[index].kind in POINT_TO_POINT}
        if not point_to_point and groups.count(groups[0]) == len(groups):
            self._lane(track, groups[0], start).rows.extend(range(start, stop))
            return
        for row in range(start, stop):
            if track.signature[row] in point_to_point:
                self._point_to_point.add(track.group[row])
            else:
                self._lane(track, track.group[row], row).rows.append(row)

    def _lane(self, track: CollectiveTrack, group: int, row: int) -> Lane:
        lanes = self.lanes.setdefault(group, {})
        if track.rank not in lanes:
            # A complete track counts from its first entry; a ring that lost its beginning from the stored sequence.
            lost = track.group.index(group) == row and track.sequence[row] > 0
            if lost:
                self._lost.add(group)
            lanes[track.rank] = Lane(track.sequence[row] if lost else 0)
        return lanes[track.rank]

    def _compare(self, group: int, record: RunRecord) -> FirstMismatch | None:
        tracks = {track.rank: track for track in record.collectives}
        # Of a rank on another node nothing may be known any more.
        lanes = {rank: lane for rank, lane in self.lanes[group].items() if rank in tracks}
        if not lanes or (group in self._lost and group in self._point_to_point):
            return None
        longest = max(lanes, key=lambda rank: (lanes[rank].end, -rank))
        partings = []
        reached = {(group, longest): lanes[longest].end}
        for rank, lane in lanes.items():
            agreed = min(self._agreed.get((group, rank), 0), self._agreed.get((group, longest), 0))
            start = max(agreed, lane.base, lanes[longest].base)
            stop = min(lane.end, lanes[longest].end)
            if rank == longest or stop <= start:
                continue
            parting = self._compare_lanes(group, (tracks[longest], tracks[rank]), start, stop, record)
            if parting is not None:
                partings.append(parting)
            reached[group, rank] = stop
        self._agreed.update(reached)
        return min(partings, key=lambda parting: parting.position, default=None)

    def _compare_lanes(
        self, group: int, tracks: tuple[CollectiveTrack, CollectiveTrack], start: int, stop: int, record: RunRecord
    ) -> FirstMismatch | None:
        one, other = lanes = [self.lanes[group][track.rank] for track in tracks]
        signatures = [lane.column(track.signature, start, stop) for lane, track in zip(lanes, tracks, strict=True)]
        steps = [lane.column(track.step, start, stop) for lane, track in zip(lanes, tracks, strict=True)]
        if signatures[0] == signatures[1] and steps[0] == steps[1]:
            return None
        for offset in range(stop - start):
            pair = signatures[0][offset], signatures[1][offset]
            difference = "" if pair[0] == pair[1] else self._difference(group, pair, record)
            form: Literal["mismatch", "desync"] = "mismatch"
            if not difference and steps[0][offset] != steps[1][offset] and group not in self._joined:
                form = "desync"
                difference = self._desync(record, tracks, (one.row(start + offset), other.row(start + offset)))
            if difference:
                rows = one.row(start + offset), other.row(start + offset)
                return FirstMismatch(
                    form=form,
                    group=group,
                    position=start + offset,
                    ranks=(tracks[0].rank, tracks[1].rank),
                    difference=difference,
                    time_ns=min(track.started_ns[row] for track, row in zip(tracks, rows, strict=True)),
                )
        return None

    def _difference(self, group: int, pair: tuple[int, int], record: RunRecord) -> str:
        key = (group, *pair)
        if key not in self._fits:
            one, other = (record.signatures[index] for index in pair)
            self._fits[key] = disagreement(one, other, record.groups[group].backend)
        return self._fits[key]

    def _desync(self, record: RunRecord, tracks: tuple[CollectiveTrack, CollectiveTrack], rows: tuple[int, int]) -> str:
        """Name the drift of two gradient buckets of one module whose steps differ; empty where they may differ.

        Where forwards are recorded only the synchronised ones count: ranks may accumulate over different numbers of
        micro-batches.
        """
        places = []
        for track, row in zip(tracks, rows, strict=True):
            if record.signatures[track.signature[row]].origin != "ddp-backward" or track.forward_site[row] < 0:
                return ""
            places.append((track.rank, track.forward_site[row], track.step[row]))
        if places[0][1] != places[1][1]:
            return ""
        if not record.forwards:
            return "step"
        if not self._synchronised:
            for forward in record.forwards:
                if forward.synchronised and forward.step > 0:
                    insort(self._synchronised.setdefault((forward.rank, forward.site), []), forward.step)
        counts = []
        for rank, site, step in places:
            steps = self._synchronised.get((rank, site), [])
            count = bisect_right(steps, step)
            if not count or steps[count - 1] != step:
                return ""
            counts.append(count)
        return "" if counts[0] == counts[1] else "step"


@once_per_record()
def matched(record: RunRecord) -> Matcher:
    """Compare the tracks of a record; once for all who ask, who advance it no further."""
    matcher = Matcher()
    matcher.advance(record)
    return matcher


def evidence_rows(track: CollectiveTrack, rank: Rank | None) -> int:
    """Count the rows of a track that are evidence: those started before the doctor ended the rank, if it did."""
    if rank is not None and rank.end == "ended-by-rehearsal" and rank.ended_ns and rank.waiting_in is None:
        return min(bisect_right(track.started_ns, rank.ended_ns), len(track))
    return len(track)
