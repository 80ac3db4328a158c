"""The collective that timed out, and the ranks that did not reach it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from ddpdoctor.diagnosis.divergence.divergence import find_divergence
from ddpdoctor.diagnosis.sync_points import GRADIENTS, lane
from ddpdoctor.finding import Frame
from ddpdoctor.record.joining import headline
from ddpdoctor.record.model import RankException, RunRecord
from ddpdoctor.record.streams.measured import CallTrack

_TIMED_OUT = re.compile(
    r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for|failed to pass monitoredBarrier"
    r"|ran for \d+ milliseconds before timing out",
    re.IGNORECASE,
)
_NCCL = re.compile(r"SeqNum=(?P<sequence>\d+), OpType=(?P<kind>\w+)")
_LIMIT = re.compile(r"Timeout\(ms\)=(\d+)|Timed out waiting (\d+)ms|in (\d+) ?ms")
_MONITORED = re.compile(r"Rank (\d+) failed to pass monitoredBarrier", re.IGNORECASE)


class TimedOut(msgspec.Struct, frozen=True, kw_only=True):
    """One timeout that ended a job."""

    ranks: tuple[int, ...]
    """Those that waited until it struck."""
    absent: tuple[int, ...]
    """Those that did not come; empty where that is not known."""
    kind: str
    """The collective, ``gradients`` for a backward; empty where it is not known."""
    sequence: int | None
    """Its number in the group, as torch or the probe counts."""
    agreed: int | None
    """The last number that all ranks came to; None where it is not known."""
    timeout_ns: int
    """0 where it is not known."""
    frame: Frame | None
    message: str


def timed_out(record: RunRecord) -> TimedOut | None:
    """Return the timeout that brought the job down; None where there was none, or the ranks' collectives name the
    cause.
    """
    struck = sorted(
        (raised.time_ns, rank.rank, raised)
        for rank in record.ranks
        for raised in rank.exceptions
        if _TIMED_OUT.search(raised.message) and raised == min(rank.exceptions, key=lambda entry: entry.time_ns)
    )
    if not struck or find_divergence(record) is not None:
        return None
    _, first, raised = struck[0]
    ranks = tuple(sorted({rank for _, rank, _ in struck}))
    said = _NCCL.search(raised.message)
    call = _last_call(record, first)
    absent, agreed = _absent(record, ranks, call, raised)
    kind = said["kind"].lower() if said else ""
    sequence = int(said["sequence"]) if said else None
    frame = raised.frames[0] if raised.frames else None
    if call is not None and not said:
        track, row = call
        kind, sequence = track.kinds[track.kind[row]], track.sequence[row]
        frame = record.site(track.site[row]).innermost or frame
    elif not said and any(heartbeat.rank == first and heartbeat.phase == "backward" for heartbeat in record.heartbeats):
        kind = GRADIENTS
    return TimedOut(
        ranks=ranks,
        absent=absent,
        kind=kind,
        sequence=sequence,
        agreed=agreed,
        timeout_ns=_limit_ns(record, raised, call),
        frame=frame,
        message=headline(raised)[:240],
    )


def _last_call(record: RunRecord, rank: int) -> tuple[CallTrack, int] | None:
    """Return the explicit collective that a rank was in when it failed."""
    track = next((track for track in record.call_tracks if track.rank == rank), None)
    if track is None or not len(track):
        return None
    row = len(track) - 1
    failed_ns = min(raised.time_ns for entry in record.ranks if entry.rank == rank for raised in entry.exceptions)
    left_ns = track.left_at_ns[row]
    # The exception left the call a moment before it was seen at the top.
    return (track, row) if track.sequence[row] >= 0 and (not left_ns or 0 <= failed_ns - left_ns < _MOMENT_NS) else None


_MOMENT_NS = 500_000_000


def _absent(
    record: RunRecord, ranks: Sequence[int], call: tuple[CallTrack, int] | None, raised: RankException
) -> tuple[tuple[int, ...], int | None]:
    """Return the ranks that did not come, and the last number that all came to."""
    monitored = _MONITORED.search(raised.message)
    if monitored:
        return (int(monitored[1]),), None
    if call is not None:
        track, row = call
        group, sequence = track.group[row], track.sequence[row]
        members = [other for other in record.call_tracks if other.rank in record.groups[group].ranks]
        place = next(at for at, own in lane(track, group).items() if own == row)
        absent = tuple(sorted(other.rank for other in members if place not in lane(other, group)))
        return absent, sequence - 1 if absent and sequence else None
    enqueued = {heartbeat.rank: heartbeat.enqueued for heartbeat in record.heartbeats if heartbeat.enqueued >= 0}
    most = max((enqueued[rank] for rank in ranks if rank in enqueued), default=-1)
    behind = tuple(sorted(rank for rank, number in enqueued.items() if number < most))
    if behind:
        return behind, min(enqueued[rank] for rank in behind)
    silent = tuple(rank.rank for rank in record.ranks if rank.rank not in ranks and not rank.exceptions)
    return (silent if len(silent) < len(record.ranks) / 2 else ()), None


def _limit_ns(record: RunRecord, raised: RankException, call: tuple[CallTrack, int] | None) -> int:
    match = _LIMIT.search(raised.message)
    if match:
        return int(next(filter(None, match.groups()))) * 1_000_000
    if call is not None:
        return record.groups[call[0].group[call[1]]].timeout_ns
    return record.groups[0].timeout_ns if record.groups else 0
