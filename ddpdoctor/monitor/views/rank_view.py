"""What each rank does now, in words, with its figures."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec

from ddpdoctor.diagnosis.performance.summary import RunSummary
from ddpdoctor.monitor.snapshot import CallView, RankView
from ddpdoctor.record.model import Rank, RunRecord, shared_fields
from ddpdoctor.record.streams.measured import CallTrack, Gauge, Phase, RankHeartbeat
from ddpdoctor.record.streams.places import StackDump

SHOWN_SILENT_AFTER_NS = 5_000_000_000
"""A heart that has not beaten for so long is worth a word."""
CALLS_SHOWN = 8
_DOING: Mapping[Phase, str] = {
    "starting": "starting",
    "data_wait": "waiting for data",
    "forward": "computing (forward)",
    "backward": "computing (backward)",
    "explicit": "in a collective",
    "optimizer": "computing (optimizer)",
    "evaluation": "evaluating",
    "saving": "saving",
    "other": "in its own code",
    "finished": "finished",
}


def rank_views(
    record: RunRecord,
    summary: RunSummary,
    now_ns: int,
    culprits: Collection[int] = (),
    lateness_ns: Callable[[int], tuple[float | None, ...]] = lambda rank: (),
) -> tuple[RankView, ...]:
    """Return one view for each rank that is known, ascending; ``lateness_ns`` gives the course of a rank's lateness."""
    beats = {beat.rank: beat for beat in record.heartbeats}
    figures = {entry.rank: entry for entry in summary.ranks}
    steps = {track.rank: (track.step[-1], track.ended_at_ns[-1]) for track in record.step_tracks if len(track)}
    calls = {track.rank: track for track in record.call_tracks}
    stacks = _newest_main_stacks(record.stacks)
    gpus = {rank: gpu.index for gpu in reversed(record.gpus) for rank in gpu.ranks}
    gauges: dict[int, list[Gauge]] = {}
    for gauge in record.gauges:
        gauges.setdefault(gauge.rank, []).append(gauge)
    views = []
    for rank in record.ranks:
        number = rank.rank
        beat, figure, stack = beats.get(number), figures.get(number), stacks.get(number)
        site = beat.site if beat is not None else -1
        step, stepped_at_ns = steps.get(number, (None, None))
        view = RankView(
            rank=number,
            local_rank=rank.local_rank,
            node=rank.node,
            host=rank.host,
            pid=rank.pid or None,
            gpu_index=gpus.get(number),
            state=state_of(rank, beat, now_ns),
            phase=beat.phase if beat is not None else "starting",
            state_since_ns=_since_ns(beat, stepped_at_ns, now_ns),
            where=record.site(site).innermost if site < len(record.sites) else None,
            alive=rank.end == "running",
            failed=_failed(rank),
            culprit=number in culprits,
            step=step,
            stepped_at_ns=stepped_at_ns,
            lateness_ns=lateness_ns(number),
            beat_at_ns=beat.beat_at_ns if beat is not None else None,
            gauges=tuple(gauges.get(number, ())),
            calls=_call_views(record, calls.get(number)),
            stack=stack.frames if stack is not None else (),
            stack_taken_at_ns=stack.time_ns if stack is not None else None,
        )
        if figure is not None:
            measured = {"measured_steps": figure.steps, "measured_at_ns": figure.measured_at_ns or None}
            view = msgspec.structs.replace(view, **shared_fields(figure, RankView) | measured)
        views.append(view)
    return tuple(views)


def state_of(rank: Rank, beat: RankHeartbeat | None, now_ns: int) -> str:
    """Return what a rank does, as a predicate."""
    if rank.end != "running":
        return _end_of(rank)
    if rank.stopped:
        return "stopped by a signal"
    if beat is None:
        return "starting"
    if _is_silent(beat, now_ns):
        return "no sign of life"
    if beat.collective:
        number = f" #{beat.sequence}" if beat.sequence >= 0 else ""
        return f"waiting in {beat.collective}{number}"
    return _DOING.get(beat.phase, beat.phase)


def _is_silent(beat: RankHeartbeat, now_ns: int) -> bool:
    return beat.beat_at_ns > 0 and now_ns - beat.beat_at_ns > SHOWN_SILENT_AFTER_NS


def _since_ns(beat: RankHeartbeat | None, stepped_at_ns: int | None, now_ns: int) -> int | None:
    """Return since when a rank does what it does; each forward of an evaluation begins the phase anew."""
    if beat is not None and _is_silent(beat, now_ns):
        return beat.beat_at_ns
    if beat is not None and beat.phase == "evaluation" and stepped_at_ns is not None:
        return stepped_at_ns
    return beat.phase_since_ns or None if beat is not None else None


def _failed(rank: Rank) -> bool:
    """Return whether a process has ended other than well; what happens to it after its script is over is no matter."""
    if rank.end in ("running", "finished", "ended-by-rehearsal") or rank.main_finished:
        return False
    return rank.end == "raised" or rank.exit_code != 0


def _end_of(rank: Rank) -> str:
    if rank.end == "raised" and rank.exceptions:
        return f"raised {rank.exceptions[0].type}"
    if rank.end == "left-by-exit" and rank.exit_code is not None:
        return f"exited with code {rank.exit_code}"
    if rank.signal is not None:
        try:
            return f"killed by {signal.Signals(rank.signal).name}"
        except ValueError:
            return f"killed by signal {rank.signal}"
    return {"finished": "finished", "left-by-exit": "exited", "raised": "failed"}.get(rank.end, "ended, cause unknown")


def _call_views(record: RunRecord, track: CallTrack | None) -> tuple[CallView, ...]:
    if track is None:
        return ()
    views = []
    for row in range(max(0, len(track) - CALLS_SHOWN), len(track)):
        group = track.group[row]
        ranks = record.groups[group].ranks if 0 <= group < len(record.groups) else ()
        kind = track.kind[row]
        views.append(
            CallView(
                kind=track.kinds[kind] if 0 <= kind < len(track.kinds) else "collective",
                group=f"{len(ranks)} ranks" if ranks else "",
                sequence=track.sequence[row],
                entered_at_ns=track.entered_at_ns[row],
                left_at_ns=track.left_at_ns[row],
                size_bytes=track.size_bytes[row],
            )
        )
    return tuple(views)


def _newest_main_stacks(stacks: Iterable[StackDump]) -> dict[int, StackDump]:
    found: dict[int, StackDump] = {}
    for stack in stacks:
        if stack.main and (stack.rank not in found or stack.time_ns >= found[stack.rank].time_ns):
            found[stack.rank] = stack
    return found
