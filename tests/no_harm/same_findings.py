"""Compares what the faults table finds with the overlay and without it."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ddpdoctor.examination import Examination
from tests.benchmarks.faults import in_directory
from tests.faults.cases import FAULTS
from tests.faults.judge import run_fault
from tests.no_harm.rehearsal import Row
from tests.scratch import scratch_directory


def same_findings(only: str = "", *, quick: bool = False) -> Iterator[Row]:
    """A row for each fault whose name has the words; it is lost when the two modes find something else."""
    with scratch_directory() as state:
        os.environ["XDG_STATE_HOME"] = str(state)
        for name, fault in FAULTS.items():
            if only not in name or (quick and not fault.quick):
                continue
            said = []
            for overlay in (True, False):
                with in_directory() as folder:
                    run = run_fault(fault, folder, overlay=overlay)
                if run.wrong:
                    said.append(f"{'with' if overlay else 'without'} the overlay: {run.wrong}")
                said.append(_told(run.examination))
            same = len(said) == 2 and said[0] == said[1]
            yield Row(
                label=f"the same finding: {name}",
                mode="overlay",
                verdict="held" if same else "lost",
                why="" if same else "; ".join(said),
            )


def _told(examination: Examination) -> str:
    """Exit code, and of each finding of the rehearsal its code, severity and ranks."""
    found = sorted(
        f"{finding.code} {finding.severity.value} of ranks {finding.ranks}"
        for finding in examination.findings
        if finding.basis & {"rehearsal"}
    )
    return f"exit {examination.exit_code}, " + (", ".join(found) or "no finding")
