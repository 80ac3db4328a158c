"""Runs that we recorded as evidence of a death: what each rank raised, how it ended, and what was found meanwhile.

A run directory holds the ranks of one node: several are one job, and their ranks' exceptions and ends are read like
those of a log, in the order of their times.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path

from ddpdoctor.catalogue.registry import read_catalogue
from ddpdoctor.catalogue.run_checks import run_live_checks
from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.postmortem.failures import details_of
from ddpdoctor.postmortem.log_reader import LogRead
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.devices import Incident, RankEnding

OF_A_DEATH = ("gradients", "collectives", "death")
"""Families of checks that may tell why a job ended, or why it hung: its figures are another matter."""


class RecordedRuns:
    """The runs of one autopsy."""

    def __init__(self) -> None:
        self.records: list[RunRecord] = []
        self.findings: list[Finding] = []
        """What the runs' own monitors, or the checks of live runs now, say of their end, the worst first."""
        self.notes: list[str] = []

    def read(self, directory: Path, name: str, positions: count[int]) -> LogRead:
        """Return what a run records of its ranks' ends; one that cannot be read costs a note."""
        # Most autopsies have no run, and the monitor takes 0.1 s to load.
        from ddpdoctor.profile.recorded_run import recorded

        try:
            snapshot, record = recorded(directory.absolute())
        except (DdpDoctorError, OSError) as error:
            self.notes.append(f"{name} cannot be read: {error}")
            return LogRead()
        self.notes += [f"{name}: {note}" for note in record.job.notes]
        self.records.append(record)
        known = [view.finding for view in snapshot.findings]
        now = [found for result in run_live_checks(read_catalogue().entries, record) for found in result.from_run]
        for finding in (*known, *(one for one in now if isinstance(one, Finding))):
            telling = finding.family in OF_A_DEATH and finding.severity.at_least(Severity.WARNING)
            if telling and not any(finding.code == other.code for other in self.findings):
                self.findings.append(finding)
        self.findings.sort(key=lambda finding: not finding.severity.at_least(Severity.ERROR))
        return _ends(record, name, positions)


def _ends(record: RunRecord, name: str, positions: count[int]) -> LogRead:
    told = LogRead(world_size=record.job.world_size)
    raised = [(one.time_ns, rank, one) for rank in record.ranks for one in rank.exceptions]
    for time_ns, rank, one in sorted(raised, key=lambda entry: entry[0]):
        kind, trouble, more = details_of(one.type, one.message, one.frames)
        told.incidents.append(
            Incident(
                kind=kind, trouble=trouble, rank=rank.rank, host=rank.host, pid=rank.pid, time_ns=time_ns, file=name,
                position=next(positions), message=one.message, frames=one.frames, **{"type": one.type, **more},
            )
        )  # fmt: skip
    for rank in record.ranks:
        told.ranks.add(rank.rank)
        code_of_end = -rank.signal if rank.signal else rank.exit_code or 0
        if code_of_end:
            told.endings.append(
                RankEnding(
                    rank=rank.rank, local_rank=rank.local_rank, pid=rank.pid, host=rank.host, exit_code=code_of_end,
                    time_ns=rank.ended_ns, file=name, position=next(positions),
                )
            )  # fmt: skip
    return told
