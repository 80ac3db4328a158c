"""How long ranks of a live run waited for others: in collectives, in backward, and in calls that still last."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from ddpdoctor.diagnosis.performance.summary import threshold
from ddpdoctor.diagnosis.record_cache import ByIdentity
from ddpdoctor.diagnosis.sync_points import GRADIENTS, gradient_meetings, lane
from ddpdoctor.diagnosis.wording import duration_text, place, rank_list, verb
from ddpdoctor.record.model import RunRecord, Site

if TYPE_CHECKING:
    from ddpdoctor.record.streams.measured import CallTrack, RankHeartbeat

_SHARED_PHASES = frozenset({"explicit", "backward"})
"""Where a rank may be waiting for others."""


class LiveWait(msgspec.Struct, frozen=True, kw_only=True):
    """One wait of some ranks of a group for others."""

    group: int
    """Index into ``RunRecord.groups``."""
    kind: str
    """The collective as users spell it, or ``gradients``."""
    waiting: tuple[int, ...]
    late: tuple[int, ...]
    """Those that came last, or have not come yet."""
    waited_ns: int
    """By the rank that came first."""
    lasts: bool = False
    site: Site = Site()
    """Where the ranks wait, if it is known."""
    late_phase: str = ""
    """What the late rank does now, of a wait that lasts."""
    late_site: Site = Site()
    """Where it does it, if it is known."""


def longest_waits(record: RunRecord) -> tuple[LiveWait, ...]:
    """Return the longest wait of each group; none for groups whose ranks are not all observed."""
    return _longest_waits(ByIdentity(record))


@lru_cache(maxsize=2)
def _longest_waits(key: ByIdentity[RunRecord]) -> tuple[LiveWait, ...]:
    record = key.of
    longest: dict[int, LiveWait] = {}
    for wait in (*_in_calls(record), *_in_gradients(record), *_in_backward_now(record)):
        known = longest.get(wait.group)
        if known is None or wait.waited_ns > known.waited_ns:
            longest[wait.group] = wait
    return tuple(longest[group] for group in sorted(longest))


def long_waits(record: RunRecord) -> Iterator[tuple[LiveWait, int]]:
    """Yield waits that came too near to the timeout of their group, with that timeout."""
    share = threshold(record, "long-wait")
    for wait in longest_waits(record):
        timeout_ns = record.groups[wait.group].timeout_ns
        if timeout_ns and wait.waited_ns >= share * timeout_ns:
            yield wait, timeout_ns


def unfit_timeouts(record: RunRecord) -> Iterator[tuple[LiveWait, int]]:
    """Yield waits that ended well and were longer than another group of the late rank may wait, with that group."""
    for wait in longest_waits(record):
        own = record.groups[wait.group]
        for number, other in enumerate(record.groups):
            shorter = 0 < other.timeout_ns < min(wait.waited_ns, own.timeout_ns or wait.waited_ns)
            if shorter and not wait.lasts and set(wait.late) < set(other.ranks):
                yield wait, number


def wait_text(wait: LiveWait) -> str:
    """Say who waits or waited how long for whom."""
    done = verb(wait.waiting, "has waited", "have waited") if wait.lasts else "waited"
    what = "backward" if wait.kind == GRADIENTS else wait.kind
    at = f" at {place(wait.site.innermost)}" if wait.site.frames else ""
    busy = ""
    if wait.lasts:
        where = f" at {place(wait.late_site.innermost)}" if wait.late_site.frames else ""
        busy = f", busy in {wait.late_phase.replace('_', ' ')}{where}" if wait.late_phase not in ("", "other") else ""
        busy = busy or (f", busy{where}" if where else "")
    waited = duration_text(wait.waited_ns)
    return f"{rank_list(wait.waiting)} {done} {waited} in {what}{at} for {rank_list(wait.late)}{busy}"


def _in_calls(record: RunRecord) -> Iterator[LiveWait]:
    """Yield the longest wait in the explicit collectives of each group, and those that last."""
    tracks = {track.rank: track for track in record.call_tracks}
    beats = {beat.rank: beat for beat in record.heartbeats}
    for number, group in enumerate(record.groups):
        if len(group.ranks) < 2 or any(rank not in tracks for rank in group.ranks):
            continue
        members = [tracks[rank] for rank in group.ranks]
        lanes = [lane(track, number) for track in members]
        best_ns, best = 0, None
        for at in set(lanes[0]).intersection(*lanes[1:]):
            entered = [track.entered_at_ns[rows[at]] for track, rows in zip(members, lanes, strict=True)]
            left = [track.left_at_ns[rows[at]] for track, rows in zip(members, lanes, strict=True)]
            first = entered.index(min(entered))
            # Where a rank did not wait for the last, as the root of a broadcast, it was gone before that came.
            waited_ns = min(max(entered), left[first] or record.job.ended_ns) - entered[first]
            if waited_ns > best_ns:
                late = group.ranks[entered.index(max(entered))]
                best_ns, best = waited_ns, (members[first], lanes[first][at], late)
        if best is not None:
            track, row, late = best
            yield LiveWait(
                group=number,
                kind=track.kinds[track.kind[row]],
                waiting=tuple(rank for rank in group.ranks if rank != late),
                late=(late,),
                waited_ns=best_ns,
                site=record.site(track.site[row]),
            )
        yield from _open_calls(record, number, members, lanes, beats)


def _open_calls(
    record: RunRecord,
    number: int,
    members: list[CallTrack],
    lanes: list[dict[tuple[bool, int], int]],
    beats: dict[int, RankHeartbeat],
) -> Iterator[LiveWait]:
    open_at = {
        at: (track, row)
        for track, rows in zip(members, lanes, strict=True)
        for at, row in rows.items()
        if not track.left_at_ns[row]
    }
    for at, (track, row) in open_at.items():
        came = [
            (member.entered_at_ns[rows[at]], member.rank)
            for member, rows in zip(members, lanes, strict=True)
            if at in rows
        ]
        late = [member.rank for member, rows in zip(members, lanes, strict=True) if at not in rows]
        if late:
            yield _lasting(
                record,
                number,
                track.kinds[track.kind[row]],
                [rank for _, rank in came],
                late,
                min(came)[0],
                beats,
                record.site(track.site[row]),
            )


def _in_gradients(record: RunRecord) -> Iterator[LiveWait]:
    """Yield the longest wait in a backward, for each set of ranks that average gradients."""
    for meeting in gradient_meetings(record):
        if meeting.ranks != meeting.members:
            continue
        group = _group_of(record, meeting.ranks)
        waits = meeting.waiting_ns
        longest = max(range(len(meeting.step)), key=lambda at: max(column[at] for column in waits))
        waited_ns = max(column[longest] for column in waits)
        arrived = [column[longest] for column in meeting.arrived_ns]
        late = meeting.ranks[arrived.index(max(arrived))]
        if group is not None and waited_ns:
            yield LiveWait(
                group=group,
                kind=GRADIENTS,
                waiting=tuple(rank for rank in meeting.ranks if rank != late),
                late=(late,),
                waited_ns=waited_ns,
            )


def _in_backward_now(record: RunRecord) -> Iterator[LiveWait]:
    """Ranks that are in backward while others of the job are elsewhere; at most so long, for they compute there too."""
    beats = {beat.rank: beat for beat in record.heartbeats}
    group = _group_of(record, tuple(sorted(beats)))
    inside = [beat for beat in beats.values() if beat.phase == "backward"]
    late = [beat.rank for beat in beats.values() if beat.phase not in (*_SHARED_PHASES, "finished")]
    if group is None or not inside or not late or len(inside) + len(late) != len(beats):
        return
    since_ns = max(beat.phase_since_ns for beat in inside)
    yield _lasting(record, group, GRADIENTS, [beat.rank for beat in inside], late, since_ns, beats, Site())


def _lasting(
    record: RunRecord,
    group: int,
    kind: str,
    waiting: list[int],
    late: list[int],
    since_ns: int,
    beats: dict[int, RankHeartbeat],
    site: Site,
) -> LiveWait:
    busy = beats.get(late[0])
    return LiveWait(
        group=group,
        kind=kind,
        waiting=tuple(sorted(waiting)),
        late=tuple(sorted(late)),
        waited_ns=record.job.ended_ns - since_ns,
        lasts=True,
        site=site,
        late_phase="" if busy is None else busy.phase,
        late_site=Site() if busy is None else record.site(busy.site),
    )


def _group_of(record: RunRecord, ranks: tuple[int, ...]) -> int | None:
    return next((number for number, group in enumerate(record.groups) if group.ranks == ranks), None)
