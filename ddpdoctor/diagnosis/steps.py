"""The measured steps of each rank in columns, without the warm-up, with what the other figures are made of."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence, Set
from functools import lru_cache, wraps
from operator import add, gt, sub
from typing import Generic, TypeVar

import msgspec

from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.measured import CallTrack, StepTrack

Held = TypeVar("Held")
Found = TypeVar("Found")


class ByIdentity(Generic[Held]):
    """A record, or a part of one, as the key of a cache: equal to itself only, so that nothing in it is compared."""

    def __init__(self, of: Held) -> None:
        self.of = of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and other.of is self.of

    def __hash__(self) -> int:
        return id(self.of)


def once_per_record(most: int = 2) -> Callable[[Callable[[Held], Found]], Callable[[Held], Found]]:
    """Keep what a function finds in each of the newest ``most`` records, or parts of records, for all who ask."""

    def decorate(function: Callable[[Held], Found]) -> Callable[[Held], Found]:
        find = lru_cache(maxsize=most)(lambda key: function(key.of))
        return wraps(function)(lambda of: find(ByIdentity(of)))

    return decorate


WARM_UP_STEPS = 3
"""The first steps allocate memory, start workers, compile, and let DDP rebuild its buckets."""
PAUSE_NS = 1_000_000_000
"""After an evaluation or a checkpoint that took longer, the next step starts loaders and caches again."""

Track = TypeVar("Track", StepTrack, CallTrack)


class RankSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of one rank that count, oldest first, in columns of equal length.

    Data wait, forward, backward, explicit, optimizer and other add up to the step. On a GPU the three in the middle are
    what its stream took, by CUDA events; the rest of the step is shared out among the others as the CPU saw them.
    """

    rank: int
    on_device: bool
    """Forward, backward and optimizer are those of the GPU."""
    row: array[int]
    """Row of the rank's track."""
    step: array[int]
    """Ordinal of the step."""
    step_ns: array[int]
    pause_ns: array[int]
    """Time between the end of the step before and the start of this; 0 where that step is not known."""
    data_wait_ns: array[int]
    forward_ns: array[int]
    backward_ns: array[int]
    explicit_ns: array[int]
    optimizer_ns: array[int]
    other_ns: array[int]
    exposed_ns: array[int]
    """-1 on a step that was not sampled, as are the next."""
    window_ns: array[int]
    ready_at_ns: array[int]
    """0 on a step that was not sampled, as is the next."""
    reduced_at_ns: array[int]

    def __len__(self) -> int:
        return len(self.row)


def recent(record: RunRecord, last_ns: int, most_steps: int = 0, fewest_steps: int = 0) -> RunRecord:
    """Return the same record with the steps and explicit collectives of the last ``last_ns`` only.

    The time counts back from the newest step of any rank, so that the figures of a job that stands still stay. With
    ``most_steps`` it is shorter where every rank made more steps than that, with ``fewest_steps`` it is longer where
    some rank made fewer.
    """
    newest_ns = max((track.ended_at_ns[-1] for track in record.step_tracks if len(track)), default=0)
    since_ns = newest_ns - last_ns
    for steps, nearest in ((most_steps, max), (fewest_steps, min)):
        if steps:
            firsts = (track.ended_at_ns[max(0, len(track) - steps)] for track in record.step_tracks if len(track))
            since_ns = nearest(since_ns, min(firsts, default=0))
    return msgspec.structs.replace(
        record,
        step_tracks=tuple(_cut(track, bisect_left(track.ended_at_ns, since_ns)) for track in record.step_tracks),
        call_tracks=tuple(_cut(track, bisect_left(track.entered_at_ns, since_ns)) for track in record.call_tracks),
    )


def between(record: RunRecord, first: int, stop: int) -> RunRecord:
    """Return the same record with the steps from ``first`` to before ``stop`` only, and their explicit collectives."""

    def cut(track: Track) -> Track:
        return _cut(track, bisect_left(track.step, first), bisect_left(track.step, stop))

    steps, calls = tuple(map(cut, record.step_tracks)), tuple(map(cut, record.call_tracks))
    return msgspec.structs.replace(record, step_tracks=steps, call_tracks=calls)


@once_per_record(most=8)
def measured_steps(record: RunRecord) -> tuple[RankSteps, ...]:
    """Return the steps that count of every rank that has any, by rank.

    Left out are the first steps of the run and those after a pause of any rank, in which the others wait for it; where
    nothing else is known they are all there is.
    """
    tracks = sorted(record.step_tracks, key=lambda track: track.rank)
    pauses_ns = [_pauses_ns(track) for track in tracks]
    after_a_pause: set[int] = set()
    for track, own_ns in zip(tracks, pauses_ns, strict=True):
        if max(own_ns, default=0) >= PAUSE_NS:
            own = {ordinal for ordinal, pause_ns in zip(track.step, own_ns, strict=True) if pause_ns >= PAUSE_NS}
            # Where most steps follow one, that is how the job goes.
            after_a_pause |= own if 2 * len(own) <= len(track) else set()
    found = (_rank_steps(track, own_ns, after_a_pause) for track, own_ns in zip(tracks, pauses_ns, strict=True))
    return tuple(steps for steps in found if len(steps))


def mean_exposed_ns(steps: RankSteps) -> float | None:
    """Mean per step of the exposed communication, not of the sampled steps alone; None where none was sampled.

    A short step is sampled less often than a long one, and steps are long because of the exposed communication. So what
    the sampled steps tell is the computation of backward, which varies little; the rest of its mean is exposed.
    """
    if min(steps.exposed_ns, default=-1) >= 0:
        computing = list(map(sub, steps.backward_ns, steps.exposed_ns))
    else:
        both = zip(steps.backward_ns, steps.exposed_ns, strict=True)
        computing = [backward_ns - exposed_ns for backward_ns, exposed_ns in both if exposed_ns >= 0]
    if min(computing, default=0) < 0:
        computing = [max(0, duration_ns) for duration_ns in computing]
    return max(0.0, mean(steps.backward_ns) - mean(computing)) if computing else None


def mean(values: Sequence[int]) -> float:
    """The mean of a column that is not empty; ``fmean`` takes several times as long, which counts with thousands."""
    return sum(values) / len(values)


def common_rows(ranks: Sequence[RankSteps]) -> list[Sequence[int]]:
    """For each rank the positions in its columns of the steps that all of the ranks have, oldest first."""
    if not ranks:
        return []
    if all(steps.step == ranks[0].step for steps in ranks):  # As nearly always, and there may be thousands.
        return [range(len(ranks[0]))] * len(ranks)
    positions = [dict(zip(steps.step, range(len(steps)), strict=True)) for steps in ranks]
    common = set(positions[0]).intersection(*positions[1:])
    ordinals = [ordinal for ordinal in ranks[0].step if ordinal in common]
    return [[place[ordinal] for ordinal in ordinals] for place in positions]


def _cut(track: Track, start: int, stop: int | None = None) -> Track:
    """Return the rows of a track from ``start`` to ``stop``, exclusive."""
    if start == 0 and (stop is None or stop >= len(track)):
        return track
    rows = slice(start, stop)
    columns = ((name, getattr(track, name)) for name in track.__struct_fields__)
    cut = {name: values[rows] for name, values in columns if isinstance(values, array)}
    return msgspec.structs.replace(track, **cut)


def _rank_steps(track: StepTrack, pauses_ns: array[int], after_a_pause: Set[int]) -> RankSteps:
    on_device = max(track.device_backward_ns, default=-1) >= 0
    lengths_ns = array("q", map(sub, track.ended_at_ns, track.started_at_ns))
    known: Sequence[int] = range(len(track))
    if min(lengths_ns, default=0) <= 0 or (on_device and min(track.device_backward_ns) < 0):
        known = [
            row
            for row, length_ns in enumerate(lengths_ns)
            if length_ns > 0 and (not on_device or track.device_backward_ns[row] >= 0)
        ]
    rows = known
    if min(track.step, default=0) <= WARM_UP_STEPS or not after_a_pause.isdisjoint(track.step):
        rows = [row for row in known if track.step[row] > WARM_UP_STEPS and track.step[row] not in after_a_pause]
        rows = rows or known

    is_whole = len(rows) == len(track)

    def column(values: array[int]) -> array[int]:
        return values if is_whole else taken(values, rows)

    step_ns = column(lengths_ns)
    forward, backward, optimizer = (
        (track.device_forward_ns, track.device_backward_ns, track.device_optimizer_ns)
        if on_device
        else (track.forward_ns, track.backward_ns, track.optimizer_ns)
    )
    parts = _shared_out(
        step_ns, [column(v) for v in (forward, backward, optimizer, track.data_wait_ns, track.explicit_ns)]
    )
    return RankSteps(
        rank=track.rank,
        on_device=on_device,
        row=array("q", rows),
        step=column(track.step),
        step_ns=step_ns,
        pause_ns=column(pauses_ns),
        forward_ns=parts[0],
        backward_ns=parts[1],
        optimizer_ns=parts[2],
        data_wait_ns=parts[3],
        explicit_ns=parts[4],
        other_ns=parts[5],
        exposed_ns=column(track.exposed_ns),
        window_ns=column(track.window_ns),
        ready_at_ns=column(track.ready_at_ns),
        reduced_at_ns=column(track.reduced_at_ns),
    )


def taken(values: array[int], rows: Sequence[int]) -> array[int]:
    """Return the values of a column in some rows, ascending; the column itself where these are all."""
    if not rows:
        return array("q")
    if rows[-1] - rows[0] == len(rows) - 1:
        return values if len(rows) == len(values) else values[rows[0] : rows[-1] + 1]
    return array("q", [values[row] for row in rows])


def _pauses_ns(track: StepTrack) -> array[int]:
    """Time between the end of the step before and the start of each; 0 where the step before is not known."""
    started, ordinals = track.started_at_ns[1:], track.step[1:]
    if max(map(sub, started, track.ended_at_ns), default=0) <= 0:
        return array("q", bytes(8 * len(track)))
    following = zip(started, track.ended_at_ns, ordinals, track.step, strict=False)
    pauses_ns = (
        started_ns - ended_ns if ordinal == before + 1 and started_ns > ended_ns else 0
        for started_ns, ended_ns, ordinal, before in following
    )
    return array("q", [0, *pauses_ns][: len(track)])


def _shared_out(step_ns: array[int], phases: Sequence[array[int]]) -> list[array[int]]:
    """Forward, backward, optimizer, data wait, explicit and other, none of them negative, as parts of the step.

    The first three come first: on a GPU they are what its stream took, and what the CPU waited for meanwhile cost
    nothing.
    """
    both = map(add, map(add, phases[0], phases[1]), phases[2])
    other_ns = array("q", map(sub, map(sub, map(sub, step_ns, both), phases[3]), phases[4]))
    if min(other_ns, default=0) >= 0 and all(min(durations_ns, default=0) >= 0 for durations_ns in phases):
        return [*phases, other_ns]
    left_ns, parts = list(step_ns), []
    for durations_ns in phases:
        if min(durations_ns, default=0) < 0 or any(map(gt, durations_ns, left_ns)):
            part = array(
                "q", [min(max(0, duration_ns), rest) for duration_ns, rest in zip(durations_ns, left_ns, strict=True)]
            )
        else:
            part = durations_ns
        parts.append(part)
        left_ns = list(map(sub, left_ns, part))
    return [*parts, array("q", left_ns)]
