"""What a run did between its newest step and its end, where nothing else shows it."""

from __future__ import annotations

import msgspec

from ddpdoctor.diagnosis.performance.summary import RunVerdict
from ddpdoctor.diagnosis.wording import duration_text, place, rank_list
from ddpdoctor.finding import Frame
from ddpdoctor.record.model import RunRecord

SHORTEST_NS = 10_000_000_000
USUAL_STEPS = 20
"""No one wonders at an end so soon after the newest step, nor at one that comes as soon as so many usual steps last."""

ASK_IT = "Look while it hangs: `ddpdoctor autopsy --live PID` shows what each rank does."


def with_last_steps(verdict: RunVerdict, record: RunRecord, usual_step_ns: float) -> RunVerdict:
    """Return the verdict on a run that is over, whose ranks may have made no step for long before its end.

    A run that was well until then is called so no more, and of a slow one nothing matters as much if it did nothing for
    longer than all its steps together have taken.
    """
    lived_ns, stood = stood_at_the_end(record, usual_step_ns)
    if not stood or verdict.state not in ("healthy", "slow"):
        return verdict
    steps_ns = usual_step_ns * max(track.step[-1] for track in record.step_tracks if len(track))
    if verdict.state == "healthy" or lived_ns > steps_ns:
        before = (f"before that, {verdict.text}",) if verdict.state == "slow" else ()
        why = (*before, *verdict.why)
        return msgspec.structs.replace(verdict, state="unknown", code="", text=stood, why=why, next=ASK_IT)
    return msgspec.structs.replace(verdict, why=(*verdict.why, stood))


def stood_at_the_end(record: RunRecord, usual_step_ns: float) -> tuple[int, str]:
    """Return for how long the ranks lived on after the newest step, in ns, and say where; nothing if that was not long.

    So it is where all scripts have run to their ends: what they did then belonged to them.
    """
    ended_ns = max((track.ended_at_ns[-1] for track in record.step_tracks if len(track)), default=0)
    left = [rank.rank for rank in record.ranks if rank.end == "left-by-exit" and not rank.exit_code]
    over = [rank.rank for rank in record.ranks if rank.main_finished or rank.end == "finished"]
    at_work = [rank.rank for rank in record.ranks if rank.rank not in (*over, *left)]
    beats = [beat for beat in record.heartbeats if beat.rank in at_work]
    lived_ns = max((beat.beat_at_ns for beat in beats), default=0) - ended_ns
    if not ended_ns or lived_ns < max(SHORTEST_NS, USUAL_STEPS * usual_step_ns):
        return 0, ""
    by_place: dict[Frame | None, list[int]] = {}
    for beat in beats:
        by_place.setdefault(record.site(beat.site).innermost if beat.site >= 0 else None, []).append(beat.rank)
    places = "; ".join(
        f"{rank_list(ranks)} at {place(frame)}" for frame, ranks in by_place.items() if frame is not None
    )
    return lived_ns, f"no step was completed in the last {duration_text(lived_ns)} of the job{places and f': {places}'}"
