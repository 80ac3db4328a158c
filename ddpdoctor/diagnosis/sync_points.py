"""The points at which ranks meet, the reductions of gradients and the explicit collectives, and who waited there.

A rank waits from its own arrival until the last rank's, but no longer than it was held up at all; the rest of the time
that it was held up is transfer. Arrivals are when the last gradient was ready and when an explicit collective was
entered. On a GPU these are when the CPU got there, and machines have clocks of their own, which says nothing: there the
rank that was held up least is the last that came, for all leave together, and what the others were held up longer is
what they waited for it. Where the clocks of nodes were compared, times are those of one clock, and a node counts as
late only beyond the error of that.

Ranks that the record does not see, as those of another node that is watched by itself, may have come later than any
that it sees: what the seen ones waited for each other is known, and the rest is transfer or waiting for the others.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import compress
from operator import sub

import msgspec

from ddpdoctor.diagnosis.steps import RankSteps, common_rows, mean_exposed_ns, measured_steps, once_per_record, taken
from ddpdoctor.record.model import RunRecord, Wrap
from ddpdoctor.record.streams.measured import CallTrack

GRADIENTS = "gradients"
BUFFERS = "buffers"
_APART_NS = 1_000_000
"""More than clocks of nodes that were compared differ by: a rank came so long after another had been served."""
_ALL_LEAVE_TOGETHER = ("all_", "barrier", "monitored_barrier", "reduce_scatter")
"""Beginnings of the collectives that no rank leaves before all have come."""


class Meetings(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Where the same ranks met, oldest first: a row a meeting, and for each rank a column."""

    ranks: tuple[int, ...]
    """Those that the record sees, at least two."""
    members: tuple[int, ...]
    """All that meet here, seen or not."""
    group: int | None = None
    """Index into ``RunRecord.groups``; None for gradients."""
    kinds: tuple[str, ...]
    """``gradients``, or of each meeting the collective as users spell it."""
    steps: float
    """How many steps were looked at: what was met in is a share of these. For gradients as many as give the mean
    exposed communication of all steps, be they sampled or not."""
    step: array[int]
    """Ordinal of the step of each meeting."""
    arrived_ns: tuple[array[int], ...]
    """By one clock for all; of GPUs only the differences mean something."""
    held_ns: tuple[array[int], ...]
    """How long the rank was held up."""
    size_bytes: array[int]

    @cached_property
    def waiting_ns(self) -> list[list[int]]:
        """How long each rank waited for the last at each meeting."""
        last_ns = list(map(max, *self.arrived_ns))
        return [
            list(map(min, map(sub, last_ns, arrived_ns), held_ns))
            for arrived_ns, held_ns in zip(self.arrived_ns, self.held_ns, strict=True)
        ]


@once_per_record(most=8)
def gradient_meetings(record: RunRecord) -> tuple[Meetings, ...]:
    """By the ranks that average gradients with each other, the measured reductions that all of them sampled."""
    return tuple(_gradient_meetings(record, measured_steps(record)))


@once_per_record(most=8)
def explicit_meetings(record: RunRecord) -> tuple[Meetings, ...]:
    """For each process group, the explicit collectives inside of the measured steps that all of its ranks went through.

    Sends and receives are left out: their two sides are no meeting of the group.
    """
    return tuple(_explicit_meetings(record, measured_steps(record)))


def _gradient_meetings(record: RunRecord, ranks: Sequence[RankSteps]) -> Iterator[Meetings]:
    by_rank = {steps.rank: steps for steps in ranks}
    tracks = {track.rank: track for track in record.step_tracks}
    for members in replica_sets(record):
        seen = _seen(record, members, by_rank)
        if len(seen) < 2:
            continue
        found = [by_rank[rank] for rank in seen]
        places = common_rows(found)
        is_relative = any(steps.on_device for steps in found) or _clocks_differ(record, members)
        columns = _sampled(found, places, is_relative=is_relative)
        if not is_relative:
            columns = _of_one_reduction(found, columns)
        if not columns[0]:
            continue
        held = tuple(_held_ns(steps, column, is_relative) for steps, column in zip(found, columns, strict=True))
        if is_relative:
            arrived = tuple(array("q", [-duration_ns for duration_ns in own]) for own in held)
        else:
            ready = (taken(steps.ready_at_ns, column) for steps, column in zip(found, columns, strict=True))
            arrived = _beyond_doubt(record, seen, tuple(ready))
        rows = taken(found[0].row, columns[0])
        exposed_ns = sum(mean_exposed_ns(steps) or 0.0 for steps in found)
        yield Meetings(
            ranks=seen,
            members=members,
            kinds=(GRADIENTS,) * len(rows),
            steps=sum(map(sum, held)) / exposed_ns if exposed_ns and any(map(any, held)) else len(rows),
            step=taken(found[0].step, columns[0]),
            arrived_ns=arrived,
            held_ns=held,
            size_bytes=taken(tracks[seen[0]].reduced_bytes, rows),
        )


def _sampled(
    found: Sequence[RankSteps], places: Sequence[Sequence[int]], *, is_relative: bool
) -> Sequence[Sequence[int]]:
    """For each rank the places of those of its steps that all ranks sampled."""

    def whole(column: array[int], own: Sequence[int], least: int) -> bool:
        return min(taken(column, own), default=least) >= least

    known = zip(found, places, strict=True)
    if all(whole(one.exposed_ns, own, 0) and (is_relative or whole(one.ready_at_ns, own, 1)) for one, own in known):
        return places

    def is_known(steps: RankSteps, at: int) -> bool:
        return steps.exposed_ns[at] >= 0 and (is_relative or steps.ready_at_ns[at] > 0)

    both = [positions for positions in zip(*places, strict=True) if all(map(is_known, found, positions))]
    return list(zip(*both, strict=True)) if both else [()] * len(found)


def _of_one_reduction(found: Sequence[RankSteps], columns: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
    """Return the places where all ranks sampled one reduction of a step with several: all come before any leaves."""
    ready = [taken(steps.ready_at_ns, column) for steps, column in zip(found, columns, strict=True)]
    reduced = [taken(steps.reduced_at_ns, column) for steps, column in zip(found, columns, strict=True)]
    spans = zip(map(max, *ready), map(min, *reduced), strict=True)
    same = [last_ns - first_ns < _APART_NS for last_ns, first_ns in spans]
    return columns if all(same) else [list(compress(column, same)) for column in columns]


def _held_ns(steps: RankSteps, places: Sequence[int], is_relative: bool) -> array[int]:
    """Return how long a rank was held up in each reduction whose arrival is known; on a GPU in all of the step."""
    if is_relative:
        return taken(steps.exposed_ns, places)
    spans = zip(taken(steps.ready_at_ns, places), taken(steps.reduced_at_ns, places), strict=True)
    return array("q", [max(0, reduced_ns - ready_ns) for ready_ns, reduced_ns in spans])


def _explicit_meetings(record: RunRecord, ranks: Sequence[RankSteps]) -> Iterator[Meetings]:
    by_rank = {steps.rank: steps for steps in ranks}
    tracks = {track.rank: track for track in record.call_tracks}
    steps_of = {track.rank: track for track in record.step_tracks}
    for number, group in enumerate(record.groups):
        seen = _seen(record, group.ranks, {rank for rank in by_rank if rank in tracks})
        if len(seen) < 2:
            continue
        lanes = [lane(tracks[rank], number) for rank in seen]
        first = by_rank[seen[0]]
        whole = steps_of[first.rank]
        rows = zip(first.row, first.step, strict=True)
        spans = [(whole.started_at_ns[row], whole.ended_at_ns[row], step) for row, step in rows]
        is_relative = _clocks_differ(record, group.ranks)
        met = list(_met([tracks[rank] for rank in seen], lanes, spans, all_leave_together=is_relative))
        if not met:
            continue
        steps, *columns = (array("q", column) for column in zip(*met, strict=True))
        members = [tracks[rank] for rank in seen]
        entered = tuple(_taken(track.entered_at_ns, rows) for track, rows in zip(members, columns, strict=True))
        left = (_taken(track.left_at_ns, rows) for track, rows in zip(members, columns, strict=True))
        held = tuple(array("q", map(sub, gone, came)) for gone, came in zip(left, entered, strict=True))
        yield Meetings(
            ranks=seen,
            members=group.ranks,
            group=number,
            kinds=tuple(members[0].kinds[members[0].kind[row]] for row in columns[0]),
            steps=len(first),
            step=steps,
            arrived_ns=tuple(array("q", [-duration for duration in own]) for own in held)
            if is_relative
            else _beyond_doubt(record, seen, entered),
            held_ns=held,
            size_bytes=_taken(members[0].size_bytes, columns[0]),
        )


def unseen_ranks(record: RunRecord) -> int:
    """Return how many ranks of the job the record does not see: they run elsewhere, or without the probe."""
    return max(0, record.job.world_size - len(record.ranks))


def _seen(record: RunRecord, members: Sequence[int], measured: Collection[int]) -> tuple[int, ...]:
    """Return the members whose steps are measured; none where a rank that the record does see has no steps yet."""
    seen = set(record.rank_numbers())
    if any(rank in seen and rank not in measured for rank in members):
        return ()
    return tuple(rank for rank in members if rank in measured)


def replica_sets(record: RunRecord) -> tuple[tuple[int, ...], ...]:
    """Return the sets of ranks that average gradients with each other; all ranks where no wrap says otherwise."""
    everyone = tuple(sorted(track.rank for track in record.step_tracks)) or record.rank_numbers()
    widest = _widest(record.wraps)
    # Of thousands of ranks each has a wrap of them all: sets are distinguished by what they are, and compared once.
    apart = {id(ranks): ranks for ranks in (widest.get(rank, everyone) for rank in everyone)}
    return tuple(dict.fromkeys(apart.values()))


@once_per_record()
def _widest(wraps: tuple[Wrap, ...]) -> dict[int, tuple[int, ...]]:
    """By rank, the ranks of its widest wrap; one object for the same ranks."""
    widest: dict[int, tuple[int, ...]] = {}
    for wrap in wraps:
        if len(wrap.ranks) > len(widest.get(wrap.rank, ())):
            widest[wrap.rank] = wrap.ranks
    alike = {id(ranks): ranks for ranks in widest.values()}
    ordered = {number: tuple(sorted(ranks)) for number, ranks in alike.items()}
    known = {ranks: ranks for ranks in ordered.values()}
    return {rank: known[ordered[id(ranks)]] for rank, ranks in widest.items()}


def lane(track: CallTrack, group: int) -> dict[tuple[bool, int], int]:
    """Row of each collective that a rank called in a group, sends and receives left out.

    By whether it is a broadcast of buffers, which DDP counts for itself, and its sequence number.
    """
    buffers = track.kinds.index(BUFFERS) if BUFFERS in track.kinds else -1
    return {
        (track.kind[row] == buffers, track.sequence[row]): row
        for row in range(len(track))
        if track.group[row] == group and track.sequence[row] >= 0
    }


def _met(
    tracks: Sequence[CallTrack],
    lanes: Sequence[Mapping[tuple[bool, int], int]],
    spans: Sequence[tuple[int, int, int]],
    *,
    all_leave_together: bool,
) -> Iterator[tuple[int, ...]]:
    """Yield each collective that all ranks ran as the same, inside of a step that counts: the step, and a row a rank.

    ``spans`` are beginning, end and ordinal of those steps. The ordinal that a call was recorded with is that of the
    step before where nothing showed yet that a new one had begun, as in a loop without a loader.
    """
    first, *others = tracks
    began_ns = [span[0] for span in spans]
    for place, row in lanes[0].items():
        at_ns = first.entered_at_ns[row]
        _, ended_ns, step = spans[max(0, bisect_right(began_ns, at_ns) - 1)]
        if not began_ns[0] <= at_ns <= ended_ns:
            continue
        rows = [other.get(place, -1) for other in lanes[1:]]
        kind = first.kinds[first.kind[row]]
        if all_leave_together and not kind.startswith(_ALL_LEAVE_TOGETHER):
            continue
        if first.left_at_ns[row] and all(
            at >= 0 and track.left_at_ns[at] and track.kinds[track.kind[at]] == kind
            for track, at in zip(others, rows, strict=True)
        ):
            yield (step, row, *rows)


def _clocks_differ(record: RunRecord, ranks: Collection[int]) -> bool:
    """Return whether ranks have several clocks of which it is not known how they differ."""
    ranks = frozenset(ranks)
    if len({(rank.host, rank.node) for rank in record.ranks if rank.rank in ranks}) < 2:
        return False
    compared = {rank for node in record.nodes if node.clock_error_ns is not None for rank in node.ranks}
    return not compared.issuperset(ranks)


def _beyond_doubt(
    record: RunRecord, ranks: Sequence[int], arrived_ns: tuple[array[int], ...]
) -> tuple[array[int], ...]:
    """Return the arrivals, where a node came so little later than another that their clocks cannot tell, as if both
    were one.

    The last rank of each node counts; how the ranks of one node follow each other stays as it is.
    """
    doubts = {rank: (at, node.clock_error_ns or 0) for at, node in enumerate(record.nodes) for rank in node.ranks}
    if not any(doubts[rank][1] for rank in ranks if rank in doubts):
        return arrived_ns
    nodes: dict[int, list[int]] = {}
    errors_ns: dict[int, int] = {}
    for place, rank in enumerate(ranks):
        node, error_ns = doubts.get(rank, (-1, 0))
        nodes.setdefault(node, []).append(place)
        errors_ns[node] = error_ns
    result = tuple(array("q", column) for column in arrived_ns)
    places_of, doubts_ns = list(nodes.values()), [errors_ns[node] for node in nodes]
    last_ns = [list(map(max, *(arrived_ns[place] for place in places), arrived_ns[places[0]])) for places in places_of]
    for row, of_nodes_ns in enumerate(zip(*last_ns, strict=True)):
        latest_ns = max(of_nodes_ns)
        doubt_ns = doubts_ns[of_nodes_ns.index(latest_ns)]
        for at, own_ns in enumerate(of_nodes_ns):
            if 0 < latest_ns - own_ns <= doubts_ns[at] + doubt_ns:
                for place in places_of[at]:
                    result[place][row] += latest_ns - own_ns
    return result


def _taken(values: array[int], rows: array[int]) -> array[int]:
    return array("q", [values[row] for row in rows])
