"""Puts together what is shown of a run at one moment; pure."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Literal

import msgspec

from ddpdoctor.diagnosis.divergence import describe
from ddpdoctor.diagnosis.divergence.divergence import Divergence
from ddpdoctor.diagnosis.divergence.waiting import LEFT
from ddpdoctor.diagnosis.live_verdict import LastingWait, may_go_on, wait_text
from ddpdoctor.diagnosis.performance.gpus import mean_utilisation
from ddpdoctor.diagnosis.performance.run_comparison import scaling_efficiency
from ddpdoctor.diagnosis.performance.summary import JobFigures, RunSummary, RunVerdict, StepTimes, threshold
from ddpdoctor.diagnosis.wording import count, duration_text, place, rank_list
from ddpdoctor.examination import Examination
from ddpdoctor.finding import Fact, Finding, Frame, Severity, grouped, signal_name
from ddpdoctor.monitor.replay import Series
from ddpdoctor.monitor.snapshot import (
    BucketView,
    CallView,
    FindingView,
    OnlyShown,
    RankView,
    RunState,
    Snapshot,
    StallSide,
    StallView,
    WaitView,
)
from ddpdoctor.record.model import Job, Rank, RunRecord, Wrap, shared_fields
from ddpdoctor.record.streams.measured import BucketLayout, CallTrack, Phase, RankHeartbeat

# A standstill for the faces: which ranks stand where, who is the culprit, and what to do.

_PLURALS = {"waits": "wait", "calls": "call", "was": "were", "is": "are", "polls": "poll", "sleeps": "sleep"}


def stall_view(divergence: Divergence, finding: Finding | None, record: RunRecord, seen_ns: int) -> StallView:
    """Describe what the job stands in; ``finding`` is what the check says that reports it.

    ``seen_ns`` is when it was found, which for who attaches later says nothing of how long the job has stood.
    """
    facts = finding.evidence if finding is not None else describe.facts(divergence, "run")
    timeout_ns = divergence.group.timeout_ns if divergence.group is not None else 0
    since_ns = _stalled_since_ns(divergence, record, seen_ns)
    return StallView(
        title=finding.title if finding is not None else describe.title(divergence),
        since_ns=since_ns,
        sides=_sides(facts, accused(divergence, finding)),
        remedy=finding.remedy if finding is not None else "",
        timeout_at_ns=min(_waits_ns(divergence, record), default=since_ns) + timeout_ns if timeout_ns else None,
        may_go_on=may_go_on(record, divergence),
    )


def accused(divergence: Divergence, finding: Finding | None) -> int | None:
    """Return the one rank that the finding of a standstill names, which may know more than how the ranks stand."""
    return finding.ranks[0] if finding is not None and len(finding.ranks) == 1 else divergence.culprit


def _stalled_since_ns(divergence: Divergence, record: RunRecord, seen_ns: int) -> int:
    """When the first rank began to wait in the store, or else when a rank last came to something new."""
    stores = [turn.wait.started_ns for turn in divergence.turns if turn.wait is not None]
    changes = [heartbeat.phase_since_ns for heartbeat in record.heartbeats if heartbeat.phase_since_ns]
    return min(stores) if stores else min(seen_ns, max(changes, default=seen_ns))


def _waits_ns(divergence: Divergence, record: RunRecord) -> Iterator[int]:
    """When each waiting rank entered its collective: its timeout counts from there."""
    for turn in divergence.turns:
        track = record.track(turn.rank)
        if turn.waiting and turn.row is not None and track is not None and turn.row < len(track):
            yield track.started_ns[turn.row]


def _sides(facts: Sequence[Fact], culprit: int | None) -> tuple[StallSide, ...]:
    """Ranks that stand at the same place, the culprit's side first."""
    alike: dict[tuple[str, tuple[Frame, ...]], list[int]] = {}
    for fact in facts:
        if fact.rank is not None and fact.text.startswith(f"rank {fact.rank} ") and "is named because" not in fact.text:
            said = fact.text.removeprefix(f"rank {fact.rank} ")
            alike.setdefault((said, fact.stack), []).append(fact.rank)
    sides = [
        StallSide(
            ranks=tuple(ranks),
            text=_of_several(said) if len(ranks) > 1 else said,
            stack=stack,
            culprit=culprit in ranks,
        )
        for (said, stack), ranks in alike.items()
    ]
    return tuple(sorted(sides, key=lambda side: (not side.culprit, side.ranks)))


def _of_several(said: str) -> str:
    """Return a predicate of one rank as one of several."""
    verb, space, rest = said.partition(" ")
    return f"{_PLURALS.get(verb, verb)}{space}{rest}"


# A wait for a rank that is at work, while it lasts and once the job was ended in the midst of it.

SHOWN_AFTER_NS = 10_000_000_000
"""A wait for a rank that works is shown after so long."""


class LastWait:
    """The wait that a watched job is in, or was ended in."""

    def __init__(self) -> None:
        self._last: tuple[LastingWait, int] | None = None

    def look(self, wait: LastingWait | None, record: RunRecord, *, told_to_end: bool) -> WaitView | None:
        """Take in what a look found; what is to be shown of it."""
        now_ns = record.job.ended_ns
        ending = told_to_end or any(rank.end in LEFT for rank in record.ranks)
        if ending:
            return None
        lasts = wait is not None and now_ns - wait.since_ns >= SHOWN_AFTER_NS
        self._last = (wait, now_ns) if wait is not None and lasts else None
        if wait is None or not lasts:
            return None
        return WaitView(
            late=wait.late,
            since_ns=wait.since_ns,
            text=wait_text(wait, now_ns),
            timeout_at_ns=wait.since_ns + wait.timeout_ns if wait.timeout_ns else None,
        )

    @property
    def ended_in(self) -> tuple[LastingWait, str] | None:
        """The wait, and what to say of it once the job was ended in it."""
        if self._last is None:
            return None
        wait, seen_ns = self._last
        return wait, wait_text(wait, seen_ns, over=True)

    def at_end(self, record: RunRecord, exit_code: int | None) -> tuple[LastingWait, str] | None:
        """Return the wait in which the job was ended, and what to say of it; None where it ended otherwise."""
        return None if exit_code == 0 or all(rank.main_finished for rank in record.ranks) else self.ended_in


# What each rank does now, in words, with its figures.

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
    *,
    told_to_end: bool = False,
) -> tuple[RankView, ...]:
    """Return one view for each rank that is known, ascending; ``lateness_ns`` gives the course of a rank's lateness."""
    beats = {beat.rank: beat for beat in record.heartbeats}
    figures = {entry.rank: entry for entry in summary.ranks}
    steps = {track.rank: (track.step[-1], track.ended_at_ns[-1]) for track in record.step_tracks if len(track)}
    calls = {track.rank: track for track in record.call_tracks}
    mains = sorted((stack for stack in record.stacks if stack.main), key=lambda stack: stack.time_ns)
    stacks = {stack.rank: stack for stack in mains}
    gpus = {rank: gpu.index for gpu in reversed(record.gpus) for rank in gpu.ranks}
    gauges = grouped(record.gauges, lambda gauge: gauge.rank)
    views = []
    for rank in record.ranks:
        number = rank.rank
        beat, figure, stack = beats.get(number), figures.get(number), stacks.get(number)
        site = beat.site if beat is not None else -1
        step, stepped_at_ns = steps.get(number, (None, None))
        view = RankView(
            rank=number,
            node=rank.node,
            host=rank.host,
            pid=rank.pid or None,
            gpu_index=gpus.get(number),
            state=state_of(rank, beat, now_ns, told_to_end=told_to_end),
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


def state_of(rank: Rank, beat: RankHeartbeat | None, now_ns: int, *, told_to_end: bool = False) -> str:
    """Return what a rank does, as a predicate; ``told_to_end``: the job was ended from here."""
    if rank.end != "running":
        own = rank.main_finished or rank.end in ("finished", "left-by-exit", "raised")
        return "ended by ddpdoctor" if told_to_end and not own else _end_of(rank)
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
        return f"killed by {signal_name(rank.signal)}"
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


# Names the gradient buckets of a run's DDP modules; pure.


def bucket_views(record: RunRecord) -> tuple[BucketView, ...]:
    """Return the newest buckets of each DDP module, first ready first.

    They are the first rank's: DDP lets it decide for all. Of modules that the same line wraps one after the other, as
    for each fold of a cross-validation, the newest stands for all.
    """
    layouts = {layout.wrap: layout for layout in record.bucket_layouts if layout.rank == _first_rank(record)}
    wraps = {wrap.wrap: wrap for wrap in record.wraps if wrap.rank == _first_rank(record)}
    newest = {(wraps[number].site, wraps[number].module_class): number for number in sorted(layouts) if number in wraps}
    classes = Counter(wraps[number].module_class for number in newest.values())
    views: list[BucketView] = []
    for number in newest.values():
        name = wraps[number].module_class
        views += _views(layouts[number], wraps[number], name if classes[name] == 1 else f"{name} (wrap {number})")
    return tuple(views)


def _first_rank(record: RunRecord) -> int:
    return min((layout.rank for layout in record.bucket_layouts), default=0)


def _views(layout: BucketLayout, wrap: Wrap, module: str) -> Iterator[BucketView]:
    """One module's buckets; DDP numbers the parameters that want gradients in the order of the module's own."""
    names = [one.name for one in wrap.reduced]
    for order, size_bytes in enumerate(layout.sizes_bytes):
        first = layout.first_parameters[order] if order < len(layout.first_parameters) else -1
        yield BucketView(
            module=module,
            order=order,
            size_bytes=size_bytes,
            parameters=layout.parameter_counts[order] if order < len(layout.parameter_counts) else None,
            first_parameter=names[first] if 0 <= first < len(names) else "",
        )


# What the ranks of a run do while they make no steps: validating, saving, waiting for one of them; where, how long.

OVERDUE_AFTER_NS = 3_000_000_000
"""Ranks whose next step takes longer do something else …"""
OVERDUE_STEPS = 4
"""… unless their usual steps (95 of 100) take more than a part of that."""
MOST_KINDS = 4
MOST_RANKS = 8


def overdue_ns(ranks: Sequence[RankView], times: StepTimes | None, now_ns: int) -> int | None:
    """Return how long ago a living rank made its newest step; None while the next is not overdue, or none was made."""
    made_at_ns = [rank.stepped_at_ns for rank in ranks if rank.alive and rank.stepped_at_ns is not None]
    since_ns = now_ns - min(made_at_ns, default=now_ns)
    patience_ns = max(OVERDUE_AFTER_NS, OVERDUE_STEPS * (times.p95_ns if times is not None else 0))
    return since_ns if since_ns > patience_ns else None


def meanwhile(ranks: Sequence[RankView], now_ns: int) -> str:
    """Return what the ranks do, those that do the same together: ``ranks 0-7 evaluating at train.py:88 for 40 s``."""
    alike = grouped(ranks, lambda rank: rank.state + (f" at {place(rank.where)}" if rank.where is not None else ""))
    told = [f"{_named(group)} {doing}{_for(group, now_ns)}" for doing, group in list(alike.items())[:MOST_KINDS]]
    others = len(ranks) - sum(len(group) for group in list(alike.values())[:MOST_KINDS])
    return ", ".join([*told, *([f"and {others} others"] if others else [])])


def _named(ranks: Sequence[RankView]) -> str:
    return rank_list(rank.rank for rank in ranks) if len(ranks) <= MOST_RANKS else f"{len(ranks)} ranks"


def _for(ranks: Sequence[RankView], now_ns: int) -> str:
    """Return for how long the one that began last has done it."""
    since_ns = [rank.state_since_ns for rank in ranks if rank.alive]
    known = [at_ns for at_ns in since_ns if at_ns is not None]
    return f" for {duration_text(max(0, now_ns - max(known)))}" if known and len(known) == len(since_ns) else ""


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """All that one look at a run brought together."""

    now_ns: int
    record: RunRecord
    summary: RunSummary
    """Of the window that is shown."""
    verdict: RunVerdict
    state: RunState
    findings: tuple[FindingView, ...] = ()
    stall: StallView | None = None
    wait: WaitView | None = None
    cause: Finding | None = None
    culprit: int | None = None
    """The rank that a proof names."""
    gpus_note: str = ""
    notes: tuple[str, ...] = ()
    launched: bool = False
    launcher_pid: int = 0
    told_to_end: bool = False
    """The job was told to end by whoever watches it."""
    exit_code: int | None = None
    source: Literal["live", "replay", "demo"] = "live"


def build_snapshot(look: Look, series: Series, name: str, run_directory: str) -> Snapshot:
    """Return what the faces are shown."""
    record, summary, job = look.record, look.summary, look.record.job
    utilisation, computing = mean_utilisation(record)
    # Advice on a rank that is slower in all it does blames no phase of it.
    holding = [view.finding for view in look.findings if view.until_ns is None]
    accused = [finding.ranks for finding in holding if finding.severity is not Severity.ADVICE]
    culprits = {look.culprit} if look.culprit is not None else _late(summary, accused)
    ranks = rank_views(record, summary, look.now_ns, culprits, series.lateness_ns, told_to_end=look.told_to_end)
    ended_ns = max((rank.ended_ns for rank in record.ranks), default=0)
    overdue = overdue_ns(ranks, summary.step_times, look.now_ns) if look.state in ("running", "stalled") else None
    return Snapshot(
        now_ns=look.now_ns,
        source=look.source,
        name=name or PurePath(job.script or run_directory).name,
        command=job.command,
        run_directory=run_directory,
        launched=look.launched,
        launcher_pid=look.launcher_pid,
        state=look.state,
        started_at_ns=job.started_ns,
        ended_at_ns=None if look.state != "ended" else ended_ns or look.now_ns,
        exit_code=look.exit_code,
        world_size=job.world_size or None,
        nodes=len({rank.node for rank in record.ranks}) or None,
        backend=job.backend,
        device=job.device,
        torch_version=job.torch_version,
        verdict=_with_meanwhile(look, ranks, overdue),
        steps=steps_made(record),
        exposed_limit=threshold(record, "exposed-communication"),
        one_rank_samples_per_s=job.one_rank_samples_per_s,
        scaling_efficiency=scaling_efficiency(record, summary),
        gpu_utilisation_percent=utilisation,
        gpu_utilisation_corrected_percent=computing,
        overdue_ns=overdue,
        meanwhile="" if overdue is None and look.stall is None else meanwhile(ranks, look.now_ns),
        ranks=ranks,
        buckets=bucket_views(record),
        gpus=record.gpus,
        gpus_note=look.gpus_note,
        findings=look.findings,
        stall=look.stall,
        wait=look.wait,
        cause=look.cause,
        history=series.history(),
        notes=look.notes,
        **shared_fields(summary, JobFigures),
    )


def _with_meanwhile(look: Look, ranks: tuple[RankView, ...], overdue: int | None) -> RunVerdict:
    """Return the verdict, and what the ranks do while no steps are made; of a standstill it says that anyway."""
    if look.state == "waiting" and look.verdict.state == "unknown":
        return msgspec.structs.replace(look.verdict, text=_awaited(look.record.job, len(ranks)))
    if overdue is None or look.state != "running":
        return look.verdict
    told = f"no step for {duration_text(overdue)}: {meanwhile(ranks, look.now_ns)}"
    waits = (look.wait.text,) if look.wait is not None else ()
    return msgspec.structs.replace(look.verdict, why=(*waits, told, *look.verdict.why))


def _awaited(job: Job, joined: int) -> str:
    """Return what a job that has not trained yet is on its way to."""
    expected = job.ranks_expected or job.world_size
    if not joined:
        return "no rank has joined a process group yet: they start Python and import torch"
    if joined < expected:
        return f"{joined} of {count(expected, 'rank')} joined the process group; it is complete when all have"
    return f"{count(joined, 'rank')} joined the process group, and none has made a training step yet"


def steps_made(record: RunRecord) -> int | None:
    """Steps that every rank has made; None before the first."""
    return min((track.step[-1] if len(track) else 0 for track in record.step_tracks), default=0) or None


def _late(summary: RunSummary, accused: Sequence[tuple[int, ...]]) -> set[int]:
    """Ranks that findings name alone and that make the others wait."""
    late = {rank.rank for rank in summary.ranks if rank.late_phase}
    return {ranks[0] for ranks in accused if len(ranks) == 1} & late


# An autopsy as a source of snapshots: the screen shows it as it shows a run that stands, without durations.


class AutopsySource(OnlyShown):
    """Fulfils ``SnapshotSource``; there is one snapshot, and nothing can be asked of the job."""

    def __init__(self, examination: Examination) -> None:
        self._snapshot = snapshot_of(examination, time.time_ns())

    def snapshot(self) -> Snapshot:
        """Return the one that there is."""
        return self._snapshot


def snapshot_of(examination: Examination, now_ns: int) -> Snapshot:
    """Return what the screen shows: the first cause as the standstill, the echoes among the findings."""
    cause = next((finding for finding in examination.findings if finding.role == "cause"), None)
    section = examination.autopsy
    ranks = () if section is None else section.ranks
    facts = [fact for finding in examination.findings for fact in finding.evidence if fact.stack]
    stacks = {fact.rank: fact.stack for fact in reversed(facts)}
    return Snapshot(
        now_ns=now_ns,
        source="autopsy",
        name=examination.target,
        state=_state(cause, alive=section is not None and section.processes > 0),
        started_at_ns=now_ns,
        world_size=len(ranks) or None,
        verdict=_verdict(cause),
        ranks=tuple(
            RankView(
                rank=rank,
                state=_said_of(rank, examination),
                culprit=cause is not None and rank in cause.ranks,
                stack=stacks.get(rank, ()),
            )
            for rank in ranks
        ),
        findings=tuple(FindingView(finding=finding, since_ns=now_ns) for finding in examination.findings),
        stall=None if cause is None else _stall(cause, examination, now_ns),
        notes=(*examination.notes, *(section.missing if section is not None else ())),
    )


def _state(cause: Finding | None, *, alive: bool) -> RunState:
    if not alive:
        return "ended"
    return "running" if cause is None else "stalled"


def _verdict(cause: Finding | None) -> RunVerdict:
    if cause is None:
        return RunVerdict(state="unknown", text="nothing in the input shows how the job died")
    why = tuple(fact.text for fact in cause.evidence[:3])
    return RunVerdict(state="broken", code=cause.code, text=cause.title, why=why, next=cause.remedy)


def _stall(cause: Finding, examination: Examination, now_ns: int) -> StallView:
    sides = [
        StallSide(
            ranks=(fact.rank,),
            text=fact.text.removeprefix(f"rank {fact.rank} "),
            stack=fact.stack,
            culprit=fact.rank in cause.ranks,
        )
        for fact in cause.evidence
        if fact.rank is not None and fact.stack
    ]
    sides += [
        StallSide(ranks=finding.ranks, text=finding.title, stack=fact.stack)
        for finding in examination.findings
        if finding.role == "echo" and finding.ranks
        for fact in finding.evidence[:1]
    ]
    sides.sort(key=lambda side: not side.culprit)
    left_s = min((fact.numbers["left_s"] for fact in cause.evidence if "left_s" in fact.numbers), default=None)
    return StallView(
        title=cause.title,
        since_ns=now_ns,
        sides=tuple(sides),
        remedy=cause.remedy,
        timeout_at_ns=None if left_s is None else now_ns + int(left_s * 1e9),
    )


def _said_of(rank: int, examination: Examination) -> str:
    """Return what the first finding that speaks of a rank says of it."""
    for finding in examination.findings:
        told = next((fact.text for fact in finding.evidence if fact.rank == rank), "")
        if told:
            return told.partition(f"rank {rank}: ")[2] or told
        if rank in finding.ranks:
            return finding.title
    return "no details are known"
