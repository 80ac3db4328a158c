"""Starts a job that hangs with plain torchrun and waits until it does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.autopsy.live_cases import Hang

PATIENCE_S = 180.0
SETTLES_S = 3.0
"""From the line before the hang until all ranks stand in it."""


@contextmanager
def hanging(job: Hang, directory: Path, settles_s: float = SETTLES_S) -> Iterator[int]:
    """The pid of the launcher of a job that hangs; all of it is ended behind."""
    script = directory / f"job_{job.name.replace('-', '_')}.py"
    script.write_text(job.script)
    log = directory / "output"
    command = (
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.ranks), str(script)
    )  # fmt: skip
    with log.open("wb") as output:
        launcher = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True
        )
        try:
            limit = time.monotonic() + PATIENCE_S
            while log.read_bytes().count(b"about to hang") < job.ranks:
                assert launcher.poll() is None and time.monotonic() < limit, log.read_text()
                time.sleep(0.1)
            time.sleep(settles_s)
            yield launcher.pid
        finally:
            if launcher.poll() is None:
                launcher.kill()
            for pid in _ranks_of(script):
                os.kill(pid, signal.SIGKILL)
            launcher.wait()


def _ranks_of(script: Path) -> list[int]:
    """Ranks run in sessions of their own."""
    import psutil

    found = []
    for process in psutil.process_iter(["cmdline"]):
        if str(script) in (process.info["cmdline"] or ()):
            found.append(process.pid)
    return found
