"""What may befall a job that is watched, and what it must come to: the same weights as without the probe."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddpdoctor.launch.environment import observed

HARMS = (
    "nothing",
    "deleted",
    "read-only",
    "truncated",
    "garbage",
    "planted exceptions",
    "patched functions",
    "settrace",
    "forks",
    "re-exec",
    "threads",
    "many modules",
    "full",
)
JOB = Path(__file__).with_name("job.py")
MOST_S = 240


class Refused(Exception):
    """This machine does not let the harm be done."""


def weights(harm: str, directory: Path, *, watched: bool = True) -> list[str]:
    """The digests of the two ranks' weights after the job has met the harm; raises when it did not come to its end."""
    directory.mkdir(parents=True)
    output = directory / "weights"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # A path with a space and letters from elsewhere, as home directories have them.
    with _disk(directory / "a rün", full=harm == "full") as run:
        if watched:
            environment |= observed(run, environment)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(JOB), harm, str(output)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=MOST_S)
        if run.exists():
            run.chmod(0o700)
    found = [directory / f"weights.{rank}" for rank in range(2)]
    if done.returncode or not all(path.exists() for path in found):
        raise AssertionError(f"{harm}: the job ended with {done.returncode}\n{done.stdout}{done.stderr}")
    if watched and harm == "nothing":
        rings = len(list(run.glob("steps-*.ring")))
        assert rings == 2, f"{rings} ranks were watched"
    return [path.read_text() for path in found]


@contextmanager
def _disk(run: Path, *, full: bool) -> Iterator[Path]:
    """The run directory; on a small disk of its own where that is to fill up."""
    if not full:
        yield run
        return
    run.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(run)], capture_output=True).returncode:
        raise Refused("no disk may be mounted here")
    try:
        yield run
    finally:
        subprocess.run(["umount", str(run)], check=False)
