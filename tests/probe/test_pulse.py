"""The heartbeat's thread outlives a fault of ours, and gives up after some."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WATCHED = (sys.executable, "-m", "ddpdoctor", "profile", "--no-tui", "--")
SCRIPT = """
import gc, sys, threading, time
import torch
from torch import distributed, nn

faults = int(sys.argv[1])
distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=0, world_size=1)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
flights = next(one for one in gc.get_objects() if type(one).__name__ == "Flights")
counts, calls = flights.counts, 0


def broken():
    global calls
    calls += 1
    if calls <= faults:
        raise ValueError("no JSON")
    return counts()


flights.counts = broken
until_s = time.monotonic() + 60
while calls < faults + 3 and time.monotonic() < until_s:
    if not any(one.name == "ddpdoctor-pulse" for one in threading.enumerate()):
        break
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
print("beats after the faults:", calls - faults)
flights.counts = counts
distributed.destroy_process_group()
"""


@pytest.mark.parametrize(("faults", "goes_on"), [(1, True), (3, False)])
def test_a_fault_in_a_beat_is_not_the_last_beat(faults: int, goes_on: bool, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ran = subprocess.run(
        (*WATCHED, sys.executable, "train.py", str(faults), str(tmp_path / "store")),
        cwd=tmp_path,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr
    more = int(ran.stdout.partition("beats after the faults: ")[2].split()[0])
    assert more >= 3 if goes_on else more <= 0
    assert "part of the observation failed: " in ran.stderr
