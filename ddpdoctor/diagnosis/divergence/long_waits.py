"""Ranks that wait long, measured by the timeout of their group, for one that comes late."""

from __future__ import annotations

import re

import msgspec

from ddpdoctor.diagnosis.divergence.matching import Matcher, matched
from ddpdoctor.diagnosis.divergence.next_calls import Lanes, NextCall, elsewhere
from ddpdoctor.diagnosis.divergence.waiting import left_ns
from ddpdoctor.diagnosis.performance.summary import threshold
from ddpdoctor.diagnosis.wording import collective, duration_text, place, rank_list
from ddpdoctor.record.model import RunRecord

_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)


class LongWait(msgspec.Struct, frozen=True, kw_only=True):
    """One collective for which ranks waited long."""

    waiting: tuple[int, ...]
    late: tuple[int, ...]
    """Ranks that came last, or never."""
    waited_ns: int
    timeout_ns: int
    """0 when not known."""
    turn: NextCall
    """The wait of the rank that came first."""
    before: NextCall | None
    """What the late rank did last before, or stands in; None when that is not known."""
    timed_out: bool
    """The wait ended by the timeout and took the job with it."""


def timed_out_wait(record: RunRecord, matcher: Matcher) -> LongWait | None:
    """Return the wait that ended the job: its timeout is the first thing that went wrong, and the late ranks lived."""
    all_raised = [(rank, error) for rank in record.ranks for error in rank.exceptions]
    raised = min(all_raised, key=lambda entry: entry[1].time_ns, default=None)
    if raised is None or not raised[1].communication or not _TIMED_OUT.search(raised[1].message):
        return None
    rank, error = raised
    track = record.track(rank.rank)
    if track is None or not len(track):
        return None
    row = len(track) - 1
    group = track.group[row]
    lanes = Lanes(record, matcher, group)
    lane = lanes.lanes.get(rank.rank)
    position = -1 if lane is None else lane.end - 1
    if lanes.row(rank.rank, position) != row:
        return None
    members = record.groups[group].ranks
    late = tuple(member for member in members if lanes.row(member, position) is None)
    known = {entry.rank: entry for entry in record.ranks}
    gone = [known[member] for member in late if member in known and known[member].ended_ns]
    if not late or any(left_ns(entry) < error.time_ns for entry in gone):
        return None
    turn = lanes.turn(rank.rank, position, True)
    assert turn is not None
    return LongWait(
        waiting=tuple(member for member in members if member not in late),
        late=late,
        waited_ns=error.time_ns - track.started_ns[row],
        timeout_ns=record.groups[group].timeout_ns,
        turn=turn,
        before=_last_turn(record, lanes, late[0], position),
        timed_out=True,
    )


def longest_wait(record: RunRecord) -> LongWait | None:
    """Return the long wait that comes nearest to the timeout of its group; waits that still last count as well."""
    matcher = matched(record)
    found = timed_out_wait(record, matcher)
    if found is not None:
        return found
    share = threshold(record, "long-wait")
    span_ns = record.job.ended_ns - record.job.started_ns
    limits = {number: record.groups[number].timeout_ns for number in matcher.lanes if matcher.is_comparable(number)}
    long = [number for number, timeout_ns in limits.items() if timeout_ns and span_ns >= share * timeout_ns]
    waits = (_longest_in(record, Lanes(record, matcher, number), number) for number in long)
    longest = max(filter(None, waits), key=lambda wait: wait.waited_ns / wait.timeout_ns, default=None)
    return longest if longest and longest.waited_ns >= share * longest.timeout_ns else None


def wait_text(wait: LongWait) -> str:
    """Say who waited how long for whom, and against which timeout."""
    assert wait.turn.signature is not None
    waited = f"{rank_list(wait.waiting)} waited {duration_text(wait.waited_ns)} in {collective(wait.turn.signature)}"
    late = f" at {place(wait.turn.line)} for {rank_list(wait.late)}"
    if wait.before is not None and wait.before.line is not None:
        doing = "busy at" if wait.before.action == "elsewhere" else "busy since"
        late += f", {doing} {place(wait.before.line)}"
    limit = duration_text(wait.timeout_ns)
    ended = f", until the timeout of {limit} ended the job" if wait.timed_out else f"; the timeout is {limit}"
    return waited + late + ended


def _longest_in(record: RunRecord, lanes: Lanes, number: int) -> LongWait | None:
    group = record.groups[number]
    if set(group.ranks) - set(lanes.lanes) or len(group.ranks) < 2:
        return None
    start = max(lane.base for lane in lanes.lanes.values())
    stop = min(lane.end for lane in lanes.lanes.values())
    best: tuple[int, int] | None = None
    for position in range(start, stop):
        times = [_started_ns(lanes, rank, position) for rank in group.ranks]
        spread_ns = max(times) - min(times)
        if best is None or spread_ns > best[0]:
            best = spread_ns, position
    if best is None:
        return None
    waited_ns, position = best
    times = [_started_ns(lanes, rank, position) for rank in group.ranks]
    late = group.ranks[times.index(max(times))]
    first = group.ranks[times.index(min(times))]
    turn = lanes.turn(first, position, True)
    assert turn is not None
    return LongWait(
        waiting=tuple(rank for rank in group.ranks if rank != late),
        late=(late,),
        waited_ns=waited_ns,
        timeout_ns=group.timeout_ns,
        turn=turn,
        before=_last_turn(record, lanes, late, position),
        timed_out=False,
    )


def _started_ns(lanes: Lanes, rank: int, position: int) -> int:
    row = lanes.row(rank, position)
    assert row is not None
    return lanes.tracks[rank].started_ns[row]


def _last_turn(record: RunRecord, lanes: Lanes, rank: int, position: int) -> NextCall | None:
    """Return what a rank called last before it came late to a position; where it stands, if it never came."""
    if lanes.row(rank, position) is None:
        here = elsewhere(record, rank, None, None)
        if here.frames:
            return here
        end = lanes.lanes[rank].end if rank in lanes.lanes else 0
        return lanes.turn(rank, end - 1, False)
    return lanes.turn(rank, position - 1, False)
