"""Says what is wrong between the ranks of a test: the rehearsal's own look, diagnosis, checks and words."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from ddpdoctor import __version__
from ddpdoctor.catalogue.registry import read_catalogue
from ddpdoctor.catalogue.run_checks import run_live_checks
from ddpdoctor.diagnosis.divergence.describe import whereabouts
from ddpdoctor.diagnosis.divergence.divergence import find_divergence
from ddpdoctor.diagnosis.divergence_kind import classify
from ddpdoctor.finding import Finding, Severity, Trouble
from ddpdoctor.monitor.rehearsed_ranks import RehearsedRanks
from ddpdoctor.record.model import Job, RunRecord
from ddpdoctor.report.finding_text import finding_lines
from ddpdoctor.report.layout import to_string
from ddpdoctor.testing.ranks import Body

STALL_AFTER_S = 5.0
WIDTH = 100
_LONE_FORWARD: Trouble = "lone-forward"
"""A forward of one rank alone may pair with a broadcast of the others in a later one, and only its line shows it."""
_OF_EXCEPTIONS: frozenset[Trouble] = frozenset(
    {"unused-parameters", "ready-twice", "mismatch", "long-wait", "out-of-memory"}
)
"""What torch's words mean, or what led to them."""


class JudgedRanks:
    """What the ranks of one test write, and what follows from it."""

    def __init__(self, directory: Path, body: Body) -> None:
        self._body = body
        self._statuses: dict[int, int] = {}
        self._ranks = RehearsedRanks(directory, STALL_AFTER_S, lambda: self._statuses)
        self._job = Job(
            kind="rehearsal",
            script=body.modules[-1][1],
            tool_version=__version__,
            layout=f"1x{body.nproc}",
            device=body.device,
            ranks_expected=body.nproc,
            started_ns=time.time_ns(),
        )

    def proves(self, deadline_ns: int, statuses: dict[int, int]) -> bool:
        """Look; tell whether there is a proof that the ranks hang or compute something else."""
        self._statuses = statuses
        self._ranks.look(deadline_ns)
        return self._ranks.shows_proof(self._ranks.record(self._job))

    def is_suspicious(self, statuses: dict[int, int]) -> bool:
        """Look at ranks that are over; tell whether they parted on their way."""
        self._statuses = statuses
        self._ranks.note_the_gone()
        self._ranks.assembly.poll()
        record = self._ranks.record(self._job)
        return find_divergence(record) is not None or _has_raised(record) or bool(record.wraps and _findings(record))

    def texts(self, stopped: str, statuses: dict[int, int]) -> tuple[str, str]:
        """Return what is wrong, in one line and at length; empty where nothing that a check speaks for."""
        self._statuses = statuses
        self._ranks.note_the_gone()
        self._ranks.assembly.poll()
        reason = "proof" if stopped == "proof" else "time-limit" if stopped == "time-limit" else ""
        record = self._ranks.record(msgspec.structs.replace(self._job, stop_reason=reason))
        if stopped:
            # The record is taken first: a signal for stacks can wake a rank that was stuck.
            record = msgspec.structs.replace(record, stacks=self._ranks.collect_stacks(self._job))
        findings = _findings(record)
        if not findings:
            where = whereabouts(record) if stopped == "time-limit" else ""
            return where, _stacks(record) if stopped == "time-limit" else ""
        first = findings[0]
        text = "\n".join(_text(finding, self._body.root) for finding in findings)
        return f"{first.title} ({first.code} {first.name})", text

    def close(self) -> None:
        """Let go of every file."""
        self._ranks.close()


def _findings(record: RunRecord) -> list[Finding]:
    """Return what the checks say that speak for what went wrong between the ranks; no advice."""
    divergence = find_divergence(record)
    troubles = {classify(divergence, record)} if divergence is not None else set()
    if record.wraps and not troubles:
        troubles.add(_LONE_FORWARD)
    if _has_raised(record):
        troubles |= _OF_EXCEPTIONS
    results = run_live_checks([entry for entry in read_catalogue().entries if entry.stands_for in troubles], record)
    found = [finding for result in results for finding in result.from_run]
    return [finding for finding in found if finding.severity is not Severity.ADVICE]


def _has_raised(record: RunRecord) -> bool:
    return any(rank.exceptions for rank in record.ranks)


def _text(finding: Finding, root: str) -> str:
    return to_string(finding_lines(finding, root, WIDTH, {"rehearsal": "in the test"}), colour=False)


def _stacks(record: RunRecord) -> str:
    """Return where the main thread of each rank was."""
    parts = []
    for stack in record.stacks:
        if stack.main:
            frames = "\n".join(f"  {frame.file}:{frame.line} in {frame.function}" for frame in stack.frames)
            parts.append(f"rank {stack.rank} was at\n{frames}")
    return "\n".join(parts)
