"""What may befall a job that is watched, and what it must come to: the same weights as without the probe."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ddpdoctor.launch.environment import observed
from tests.jobs_of_tests import kill_marked, marked

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
    "os._exit",
    "re-exec in training",
    "monitor killed",
)
ENDS_ITSELF = "os._exit"
"""With it the job trains less: what it comes to is compared with the same job, unwatched."""
JOB = Path(__file__).with_name("job.py")
MOST_S = 240


class Refused(Exception):
    """This machine does not let the harm be done."""


def weights(harm: str, directory: Path, *, watched: bool = True) -> list[str]:
    """The digests of the two ranks' weights after the job has met the harm; raises when it did not come to its end."""
    directory.mkdir(parents=True)
    output = directory / "weights"
    environment = {**marked(os.environ, directory), "OMP_NUM_THREADS": "1"}
    # A path with a space and letters from elsewhere, as home directories have them.
    with _disk(directory / "a rün", full=harm == "full") as run:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(JOB), harm, str(output)]
        if harm == "monitor killed":
            return _weights_without_monitor(command, run, output, environment)
        if watched:
            environment |= observed(run, environment)
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=MOST_S)
        finally:
            kill_marked(directory)
        if run.exists():
            run.chmod(0o700)
    found = _found(output)
    if done.returncode or not all(path.exists() for path in found):
        raise AssertionError(f"{harm}: the job ended with {done.returncode}\n{done.stdout}{done.stderr}")
    if watched and harm == "nothing":
        rings = len(list(run.glob("steps-*.ring")))
        assert rings == 2, f"{rings} ranks were watched"
    return [path.read_text() for path in found]


def _weights_without_monitor(command: list[str], run: Path, output: Path, environment: Mapping[str, str]) -> list[str]:
    """Launch the job with ``profile``, kill that in the middle of the training, and see what the job comes to."""
    profile = [sys.executable, "-m", "ddpdoctor", "profile", "--no-tui", "--run-dir", str(run), "--", *command]
    with open(output.with_name("printed"), "wb") as printed:
        monitor = subprocess.Popen(profile, env=environment, stdout=printed, stderr=subprocess.STDOUT)
    try:
        _wait_for(output.with_name("weights.reached"))
        monitor.kill()
        monitor.wait()
        output.with_name("weights.killed").touch()
        for path in _found(output):
            _wait_for(path)
            _wait_until(functools.partial(_is_written, path), f"{path} stayed empty")
    finally:
        kill_marked(output.parent)
        monitor.wait()
    return [path.read_text() for path in _found(output)]


def _found(output: Path) -> list[Path]:
    return [output.with_name(f"{output.name}.{rank}") for rank in range(2)]


def _is_written(path: Path) -> bool:
    return len(path.read_text()) == 64


def _wait_for(path: Path) -> None:
    _wait_until(path.exists, f"{path} never came:\n{path.with_name('printed').read_text()}")


def _wait_until(holds: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + MOST_S
    while not holds():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)


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
