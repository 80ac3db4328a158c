"""What may befall the probe within a rank that is watched, and what the job must come to: the same weights as without.

What befalls its files, its processes and the machine are rows of ``tests.monitor_faults``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ddpdoctor.launch.environment import observed
from tests.jobs_of_tests import kill_marked, marked

HARMS = (
    "nothing",
    "planted exceptions",
    "patched functions",
    "forks",
    "threads",
    "many modules",
    "re-exec in training",
)
JOB = Path(__file__).with_name("job.py")
MOST_S = 240


def weights(harm: str, directory: Path, *, watched: bool = True) -> list[str]:
    """The digests of the two ranks' weights after the job has met the harm; raises when it did not come to its end."""
    directory.mkdir(parents=True)
    output = directory / "weights"
    environment = {**marked(os.environ, directory), "OMP_NUM_THREADS": "1"}
    # A path with a space and letters from elsewhere, as home directories have them.
    run = directory / "a rün"
    if watched:
        environment |= observed(run, environment)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(JOB), harm, str(output)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=MOST_S)
    finally:
        kill_marked(directory)
    found = [output.with_name(f"{output.name}.{rank}") for rank in range(2)]
    if done.returncode or not all(path.exists() for path in found):
        raise AssertionError(f"{harm}: the job ended with {done.returncode}\n{done.stdout}{done.stderr}")
    if watched and harm == "nothing":
        rings = len(list(run.glob("steps-*.ring")))
        assert rings == 2, f"{rings} ranks were watched"
    return [path.read_text() for path in found]
