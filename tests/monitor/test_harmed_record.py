"""A record that other programs truncate while the job runs: the job trains on, and the monitor tells what it misses."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.jobs_of_tests import kill_marked, marked
from tests.monitor.watched import HEAD, MOST_S

SCRIPT = (
    HEAD
    + """
import hashlib, pathlib
model = DDP(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(100_000):
    go = torch.tensor(float(step < 300 or not pathlib.Path("enough").exists()))
    dist.broadcast(go, 0)
    if not go.item():
        break
    loss = model(torch.full((4, 8), 1.0 + rank)).square().sum()
    loss.backward()
    if step < 300:
        optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.002)
digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values()))
pathlib.Path(f"weights-{rank}").write_text(digest.hexdigest())
os._exit(0)
"""
)
TIMES = 50


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "train.py").write_text(SCRIPT)
    yield tmp_path
    kill_marked(tmp_path)


def _weights(folder: Path) -> list[str]:
    return [(folder / f"weights-{rank}").read_text() for rank in range(2)]


@pytest.mark.full
def test_fifty_truncations_and_stops_cost_rows_and_neither_the_job_nor_the_watching(folder: Path) -> None:
    seed = random.randrange(1 << 30)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "train.py")
    environment = {**marked(os.environ, folder), "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(folder / "state")}
    (folder / "enough").touch()
    subprocess.run(torchrun, cwd=folder, env=environment, capture_output=True, timeout=MOST_S, check=True)
    expected = _weights(folder)
    for path in (*folder.glob("weights-*"), folder / "enough"):
        path.unlink()
    said = _harmed(folder, torchrun, environment, TIMES, seed)
    assert _weights(folder) == expected, f"seed {seed}: {said}"


def test_truncated_events_are_no_proof_that_ranks_part(folder: Path) -> None:
    seed = random.randrange(1 << 30)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "train.py")
    environment = {**marked(os.environ, folder), "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(folder / "state")}
    said = _harmed(folder, torchrun, environment, 6, seed, "events-")
    assert "where the ranks diverge is unknown" in " ".join(said.split()), f"seed {seed}: {said}"


def _harmed(
    folder: Path, torchrun: tuple[str, ...], environment: dict[str, str], times: int, seed: int, only: str = ""
) -> str:
    """What is said of a job of whose record files, those that begin with ``only``, are truncated so many times."""
    chance = random.Random(seed)
    profile = (sys.executable, "-m", "ddpdoctor", "profile", "--no-tui", "--run-dir", "run", "--", *torchrun)
    with (folder / "out").open("wb") as out:
        monitor = subprocess.Popen(profile, cwd=folder, env=environment, stdout=out, stderr=out)
    try:
        _until(lambda: len(list((folder / "run").glob("calls-*.ring"))) == 2, monitor, folder, seed)
        for number in range(times):
            time.sleep(chance.uniform(0.02, 0.3))
            files = [
                path for path in (folder / "run").glob(f"{only}*") if path.name not in ("job.json", "history.lock")
            ]
            path = chance.choice(sorted(files))
            os.truncate(path, chance.choice((0, chance.randrange(path.stat().st_size + 1))))
            if number % 10 == 9:
                monitor.send_signal(signal.SIGSTOP)
                time.sleep(chance.uniform(0.3, 1.5))
                monitor.send_signal(signal.SIGCONT)
        time.sleep(2)  # The newest look of the monitor is so old at most.
        (folder / "enough").touch()
        code = monitor.wait(MOST_S)
    finally:
        kill_marked(folder)
        monitor.wait()
    said = (folder / "out").read_text()
    assert code == 0, f"seed {seed}: {said}"
    assert "observation failed" not in said and "Traceback" not in said, f"seed {seed}: {said}"
    assert not re.search("STALLED|BROKEN|is lost", said), f"seed {seed}: {said}"
    assert "another program truncated" in " ".join(said.split()), f"seed {seed}: {said}"
    return said


def _until(holds: Callable[[], bool], monitor: subprocess.Popen[bytes], folder: Path, seed: int) -> None:
    deadline = time.monotonic() + MOST_S
    while not holds():
        assert monitor.poll() is None and time.monotonic() < deadline, f"seed {seed}: {(folder / 'out').read_text()}"
        time.sleep(0.05)
