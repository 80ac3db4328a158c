"""The rank whose process was killed first, where none of them failed by itself."""

from __future__ import annotations

import re
import signal

import msgspec

from ddpdoctor.diagnosis.divergence.aborted import CRASHES, Call, call_it_died_in, find_aborted, was_terminated
from ddpdoctor.diagnosis.divergence.matching import matched
from ddpdoctor.diagnosis.divergence.waiting import is_echo
from ddpdoctor.record.model import Rank, RunRecord

BEATS_APART_NS = 1_000_000_000
"""A rank whose heart stopped so much earlier than the others' was gone before them; it beats five times a second."""
PEERS_END_WITHIN_NS = 2_000_000_000
"""So long after a crash its peers, who lose their connection or are ended for it, have written where they were."""
_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
_BY_HAND = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""How launchers, schedulers and users end a job."""


class Killed(msgspec.Struct, frozen=True, kw_only=True):
    """A process that ended without an exception or an exit."""

    rank: int
    signal: int | None
    """None where none is known."""
    host: str
    pid: int
    phase: str
    """What it did last, as its heartbeat says; empty when it had none."""
    step: int
    within: Call | None
    """The explicit collective that it was in; None where it was in none."""
    echoes: tuple[int, ...]
    """Ranks that failed because it was gone."""


def killed_rank(record: RunRecord) -> Killed | None:
    """Return the first rank that was killed while others were at work; None where that is not known.

    Processes that all vanish at the same moment were ended together, by their launcher or the user, and those of a job
    that was told to end by that: nothing is said.
    Nor is it of a rank that a collective ended which the others were not in: that is a divergence.
    """
    dead = [rank for rank in record.ranks if rank.end == "signalled" and not rank.main_finished]
    own = [rank for rank in dead if rank.signal not in _BY_HAND and not was_terminated(record, rank)]
    if not own or record.job.stop_reason == "interrupted":
        return None
    if any(rank.exceptions and not is_echo(rank) for rank in record.ranks):
        return None
    beats = {heartbeat.rank: heartbeat.beat_at_ns for heartbeat in record.heartbeats}
    last_sign = {rank.rank: beats.get(rank.rank, rank.ended_ns) for rank in record.ranks}
    first = min(own, key=lambda rank: (rank.signal is None, last_sign[rank.rank], rank.rank))
    if find_aborted(record, matched(record)) is not None:
        return None
    if first.signal is None and not _went_first(first, record, last_sign):
        return None
    heartbeat = record.heartbeat(first.rank)
    return Killed(
        rank=first.rank,
        signal=first.signal,
        host=first.host,
        pid=first.pid,
        phase="" if heartbeat is None else heartbeat.phase,
        step=0 if heartbeat is None else heartbeat.step,
        within=call_it_died_in(record, first),
        echoes=tuple(rank.rank for rank in record.ranks if is_echo(rank)),
    )


def may_yet_be_known(record: RunRecord, rank: Rank) -> bool:
    """Return whether a rank crashed just now, and why may be seen by what happens to those that still run."""
    others_run = any(other.end == "running" for other in record.ranks if other.rank != rank.rank)
    crashed = rank.end == "signalled" and rank.signal in CRASHES
    return crashed and others_run and record.job.ended_ns - rank.ended_ns < PEERS_END_WITHIN_NS


def _gave_up_before(rank: Rank, time_ns: int) -> bool:
    """Return whether a rank waited until a timeout struck it, and another lived on: the launcher ended that one
    then.
    """
    first = min(rank.exceptions, key=lambda error: error.time_ns, default=None)
    return first is not None and first.time_ns < time_ns and bool(_TIMED_OUT.search(first.message))


def _went_first(first: Rank, record: RunRecord, last_sign: dict[int, int]) -> bool:
    """Return whether the others outlived a rank: they failed or were ended for it, are there, or their hearts beat
    on.
    """
    others = [rank for rank in record.ranks if rank.rank != first.rank]
    if any(_gave_up_before(rank, last_sign[first.rank]) for rank in others):
        return False
    lived_on = [rank for rank in others if rank.end == "running" or is_echo(rank) or was_terminated(record, rank)]
    beat_on = all(last_sign[rank.rank] - last_sign[first.rank] >= BEATS_APART_NS for rank in others)
    return bool(lived_on) or (bool(others) and beat_on)
