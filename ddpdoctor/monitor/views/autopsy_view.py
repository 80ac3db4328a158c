"""An autopsy as a source of snapshots: the screen shows it as it shows a run that stands, without durations."""

from __future__ import annotations

import time

from ddpdoctor.diagnosis.performance.summary import RunVerdict
from ddpdoctor.examination import Examination
from ddpdoctor.finding import Finding, Frame
from ddpdoctor.monitor.snapshot import FindingView, RankView, RunState, Snapshot, StallSide, StallView


class AutopsySource:
    """Fulfils ``SnapshotSource``; there is one snapshot, and nothing can be asked of the job."""

    def __init__(self, examination: Examination) -> None:
        self._snapshot = snapshot_of(examination, time.time_ns())

    def snapshot(self) -> Snapshot:
        """Return the one that there is."""
        return self._snapshot

    def ask_for_stacks(self, rank: int) -> None:
        """Do nothing."""

    def end_job(self) -> None:
        """Do nothing: the job was not started by this program."""

    def close(self) -> None:
        """Do nothing."""


def snapshot_of(examination: Examination, now_ns: int) -> Snapshot:
    """Return what the screen shows: the first cause as the standstill, the echoes among the findings."""
    cause = next((finding for finding in examination.findings if finding.role == "cause"), None)
    section = examination.autopsy
    ranks = () if section is None else section.ranks
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
                stack=_stack_of(rank, examination),
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


def _stack_of(rank: int, examination: Examination) -> tuple[Frame, ...]:
    facts = (fact for finding in examination.findings for fact in finding.evidence)
    return next((fact.stack for fact in facts if fact.rank == rank and fact.stack), ())
