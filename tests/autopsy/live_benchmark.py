"""Looks at 21 jobs that hang and were started by plain torchrun: the right rank and line, and how long it took."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from ddpdoctor.autopsy.dead_job import AutopsyRequest
from ddpdoctor.autopsy.live_job import live_autopsy
from ddpdoctor.finding import Finding
from tests.autopsy.hanging import hanging
from tests.autopsy.live_cases import HANGS, Hang

FEWEST_RIGHT = 19
SECONDS = 5.0


def look_at(job: Hang, directory: Path) -> tuple[Finding | None, float]:
    """The cause that is named, and the seconds that it took."""
    with hanging(job, directory) as launcher:
        started = time.perf_counter()
        examination = live_autopsy(AutopsyRequest(paths=()), (launcher,), ())
        seconds = time.perf_counter() - started
    return next((finding for finding in examination.findings if finding.role == "cause"), None), seconds


def is_right(job: Hang, cause: Finding | None) -> bool:
    """The culprit alone is named, with its line first."""
    return cause is not None and cause.ranks == (job.culprit,) and cause.locations[0].line == job.line


def main() -> int:
    """Print one line a job."""
    right, slowest = 0, 0.0
    for job in HANGS:
        with tempfile.TemporaryDirectory() as directory:
            cause, seconds = look_at(job, Path(directory))
        right += is_right(job, cause)
        slowest = max(slowest, seconds)
        said = "nothing" if cause is None else cause.title
        print(f"{'right' if is_right(job, cause) else 'WRONG'}  {seconds:4.1f} s  {job.name}: {said}", flush=True)
    print(f"{right} of {len(HANGS)} right (bound {FEWEST_RIGHT}), the slowest in {slowest:.1f} s (bound {SECONDS:.0f})")
    return 0 if right >= FEWEST_RIGHT and slowest <= SECONDS else 1
