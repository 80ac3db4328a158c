"""The heartbeat's thread outlives a fault of ours, and gives up after some."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ddpdoctor.record import layout
from ddpdoctor.record.ring_reader import RingTail

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


STANDS = """
import sys, time
import torch
from torch import distributed, nn

distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(100):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print("stands", flush=True)
sys.stdin.read()
distributed.destroy_process_group()
"""


def test_what_a_standing_rank_reads_and_writes_is_all_counted_as_the_probes_own(tmp_path: Path) -> None:
    """Otherwise a rank that is stuck looks as if it did something, and is never called so."""
    (tmp_path / "train.py").write_text(STANDS)
    with subprocess.Popen(
        (*WATCHED, sys.executable, "train.py", str(tmp_path / "store")),
        cwd=tmp_path,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as watched:
        assert watched.stdin is not None and watched.stdout is not None
        while watched.stdout.readline() != b"stands\n":
            assert watched.poll() is None
        (ring,) = (tmp_path / "state").rglob("steps-*.ring")
        reader, pid = RingTail(ring, layout.STEPS), int(ring.stem.partition("-")[2])
        seen = set[int]()
        counted = collections.Counter[int]()
        until_s = time.monotonic() + 60
        while max(counted.values(), default=0) < 20 and time.monotonic() < until_s:
            before = reader.heartbeat().own_bytes
            io = psutil.Process(pid).io_counters()
            if reader.heartbeat().own_bytes == before not in seen:
                seen.add(before)
                counted[io.read_chars + io.write_chars - before] += 1
            time.sleep(0.05)
        watched.stdin.close()
        watched.wait(60)
    assert max(counted.values(), default=0) >= 20, counted
