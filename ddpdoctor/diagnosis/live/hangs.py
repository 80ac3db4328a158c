"""Whether a rank that does nothing may still continue by itself."""

from __future__ import annotations

from ddpdoctor.diagnosis.divergence.divergence import Divergence
from ddpdoctor.diagnosis.divergence.next_calls import NextCall
from ddpdoctor.diagnosis.wording import duration_text, place
from ddpdoctor.finding import Frame
from ddpdoctor.record.model import RunRecord

POLLING_NS = 2_000_000_000
"""A rank that stood long and has less than this left to sleep is taken to sleep in a loop."""

PATIENCE_NS = 60_000_000_000
"""In a live run a rank may do nothing for so long and continue: it saves to a slow disk, uploads, sleeps before it
tries
again. A rehearsal has no disk of the cluster's and a time limit instead."""


def may_go_on(record: RunRecord, divergence: Divergence) -> bool:
    """Return whether it is not proved yet that the ranks will stand for good.

    That is so for a sleep that ends before the group's timeout, for what another program may make, for a rank that
    works, or whose other threads or children do, and in a live run for the first minute in which a living rank does
    nothing.
    """
    if any(turn.polls_for or turn.loops for turn in divergence.turns):
        return True
    asleep = [turn for turn in divergence.turns if turn.sleeps_ns]
    timeout_ns = divergence.group.timeout_ns if divergence.group is not None else 0
    if asleep:
        return all(turn.sleeps_ns < timeout_ns for turn in asleep)
    restless = {rank.rank for rank in record.ranks if rank.restless}
    if any(turn.rank in restless and not turn.waiting for turn in divergence.turns):
        return True
    if record.job.kind != "run" or divergence.form != "stuck" or any(turn.stopped for turn in divergence.turns):
        return False
    return _stood_ns(record) < PATIENCE_NS


def sleep_text(turn: NextCall, at: Frame | None) -> str:
    """Say that a rank sleeps, or asks again and again, where it has set itself a clock."""
    within = f" in `{at.function}`" if at is not None and at.function not in ("", "<module>") else ""
    if turn.sleeps_ns < POLLING_NS:
        return f"which polls in a loop{within} at {place(at)}"
    return f"which sleeps{within} at {place(at)} for another {duration_text(turn.sleeps_ns)}"


def _stood_ns(record: RunRecord) -> int:
    """Return for how long the stuck ranks that live have stood at one place; very long where none of them lives."""
    stuck = {rank.rank for rank in record.ranks if rank.stuck and rank.end == "running"}
    now_ns = record.job.ended_ns
    beats = [beat for beat in record.heartbeats if beat.rank in stuck]
    return max((now_ns - beat.beat_at_ns + beat.unchanged_ms * 1_000_000 for beat in beats), default=now_ns)
