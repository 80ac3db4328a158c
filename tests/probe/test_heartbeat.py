"""The heartbeat: what it takes in of what the hooks keep, and that it outlives a fault of ours."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from ddpdoctor.probe.live.observer import MOST_WAITING, Moments
from ddpdoctor.record import layout
from ddpdoctor.record.ring_reader import RingTail

# What the hooks keep is taken in once each, in order, whoever does it and whatever goes wrong meanwhile.


class Told:
    """Takes down what it is told."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.faults: list[str] = []
        self.moments = Moments(lambda where, error, harms: self.faults.append(f"{where}: {error}"))

    def number(self, number: int) -> None:
        self.numbers.append(number)

    def wrong(self, number: int) -> None:
        raise ValueError(number)

    def trains_meanwhile(self, number: int) -> None:
        """As the handler of a signal does that comes while moments are taken in."""
        self.moments.keep((self.number, number))
        self.moments.take_in()
        self.numbers.append(-number)


def test_moments_are_taken_in_order_and_a_fault_loses_its_own_alone() -> None:
    told = Told()
    for function, number in ((told.number, 1), (told.wrong, 2), (told.number, 3)):
        told.moments.keep((function, number))
    assert told.numbers == []
    told.moments.take_in()
    told.moments.take_in()
    assert told.numbers == [1, 3]
    assert told.faults == ["wrong: 2"]


def test_what_is_kept_while_moments_are_taken_in_comes_after_them() -> None:
    told = Told()
    told.moments.keep((told.trains_meanwhile, 1))
    told.moments.keep((told.number, 2))
    told.moments.take_in()
    told.moments.take_in()
    assert told.numbers == [-1, 2, 1]


def test_a_thread_that_keeps_takes_in_itself_when_nobody_else_does() -> None:
    told = Told()
    for number in range(MOST_WAITING - 1):
        told.moments.keep((told.number, number))
        told.moments.make_room()
    assert told.numbers == []
    told.moments.keep((told.number, MOST_WAITING - 1))
    told.moments.make_room()
    assert told.numbers == list(range(MOST_WAITING))


def test_two_threads_take_in_each_moment_once_and_in_order() -> None:
    told = Told()
    over = threading.Event()

    def heartbeat() -> None:
        while not over.is_set():
            told.moments.take_in()

    thread = threading.Thread(target=heartbeat)
    thread.start()
    for number in range(20_000):
        told.moments.keep((told.number, number))
        if number % 7 == 0:
            told.moments.take_in()
            assert told.numbers[-1] == number  # whoever takes in last knows all that was kept before
    over.set()
    thread.join()
    told.moments.take_in()
    assert told.numbers == list(range(20_000))


def test_a_forked_child_takes_in_nothing_of_its_parent_and_does_not_wait_for_its_threads() -> None:
    told = Told()
    held = threading.Event()
    let_go = threading.Event()

    def hold() -> None:
        with told.moments.lock:
            held.set()
            let_go.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    told.moments.keep((told.number, 1))
    told.moments.become_forked_child()
    told.moments.keep((told.number, 2))
    told.moments.take_in()
    assert told.numbers == [2]
    let_go.set()
    thread.join()


# The heartbeat's thread outlives a fault of ours, and gives up after some.
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
