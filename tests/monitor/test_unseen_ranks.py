"""Ranks in a container that the monitor cannot look into live as long as their heart beats; nothing false is told."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ddpdoctor.launch.pid_namespaces import OuterPids
from ddpdoctor.monitor.processes.hosts import FIRST_BEAT_WITHIN_NS, SILENT_FOR_NS, UnseenRanks
from ddpdoctor.record import events, layout
from ddpdoctor.record.assembly.ranks import RankBook
from ddpdoctor.record.ring_reader import Heartbeat, RingTail
from tests.jobs_of_tests import kill_marked, marked

SCRIPT = """
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
over = torch.zeros(1)
while not over:
    optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
    over = torch.tensor([float(os.path.exists("over"))])
    dist.all_reduce(over)
dist.destroy_process_group()
"""
ELSEWHERE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
UNPRIVILEGED = shutil.which("unshare") is None or bool(
    subprocess.run([*ELSEWHERE, "true"], capture_output=True, check=False).returncode
)
NOW_NS = 10**18


class Ring(RingTail):
    """A ring with a beat."""

    def __init__(self, beat_ns: int) -> None:
        self.beat_ns = beat_ns

    def heartbeat(self) -> Heartbeat:
        """Return it."""
        return Heartbeat(beat_at_ns=self.beat_ns)


NOBODY = (1 << 22) + 7
"""A number above all that Linux gives."""


def test_a_process_that_is_not_seen_lives_while_it_beats_and_is_not_gone_without_a_word(tmp_path: Path) -> None:
    ranks, ring, book = UnseenRanks(OuterPids(tmp_path)), Ring(NOW_NS - 1), RankBook()
    ranks.look({NOBODY: ring}, book, NOW_NS)
    assert ranks.live(NOBODY, NOW_NS)
    assert not ranks.may_live(NOBODY, NOW_NS + FIRST_BEAT_WITHIN_NS)
    ring.beat_ns += 200_000_000
    ranks.look({NOBODY: ring}, book, NOW_NS)
    assert ranks.live(NOBODY, NOW_NS + SILENT_FOR_NS - 1)
    assert not ranks.live(NOBODY, NOW_NS + SILENT_FOR_NS)
    assert ranks.may_live(NOBODY, NOW_NS + 100 * SILENT_FOR_NS)


def test_one_that_has_told_its_end_is_gone_once_it_beats_no_more(tmp_path: Path) -> None:
    ranks, ring, book = UnseenRanks(OuterPids(tmp_path)), Ring(NOW_NS - 1), RankBook()
    ranks.look({NOBODY: ring}, book, NOW_NS)
    ring.beat_ns += 200_000_000
    book.take(NOBODY, events.Exit(time_ns=NOW_NS, finished=True, code=0))
    ranks.look({NOBODY: ring}, book, NOW_NS)
    assert ranks.live(NOBODY, NOW_NS)
    assert not ranks.may_live(NOBODY, NOW_NS + FIRST_BEAT_WITHIN_NS)


@pytest.mark.parametrize("beat_ns", [NOW_NS - FIRST_BEAT_WITHIN_NS, NOW_NS - 10**12])
def test_one_that_has_long_ended_does_not(tmp_path: Path, beat_ns: int) -> None:
    ranks = UnseenRanks(OuterPids(tmp_path))
    ranks.look({NOBODY: Ring(beat_ns)}, RankBook(), NOW_NS)
    assert not ranks.may_live(NOBODY, NOW_NS)


def test_one_that_is_seen_is_not_judged_by_its_beat(tmp_path: Path) -> None:
    outer = OuterPids(tmp_path)
    with open(tmp_path / layout.STEPS_FILE.format(os.getpid()), "wb"):
        assert outer.is_alive(os.getpid())
    ranks, ring = UnseenRanks(outer), Ring(NOW_NS)
    ranks.look({os.getpid(): ring}, RankBook(), NOW_NS)
    assert not ranks.live(os.getpid(), NOW_NS)


@pytest.mark.skipif(UNPRIVILEGED, reason="no namespace of processes can be made here")
def test_a_monitor_in_another_container_says_what_it_cannot_see_and_accuses_nobody(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    run, report = tmp_path / "run", tmp_path / "report.json"
    job = _started(tmp_path, "job", "--run-dir", str(run), "--nproc", "2", "train.py")
    try:
        _wait_for(lambda: len(list(run.glob("steps-*.ring"))) == 2)
        words = ("--run-dir", str(run), "--output-format", "json", "-o", str(report))
        other = _started(tmp_path, "other", *words, prefix=ELSEWHERE)
        output = tmp_path / "other.txt"
        _wait_for(lambda: "cannot be seen from here" in output.read_text())
        _wait_for(lambda: output.read_text().count(": step ") >= 2)
        for process in psutil.Process(other.pid).children():
            process.terminate()  # `unshare` itself does not heed it.
        other.wait(timeout=120)
        (tmp_path / "over").touch()
        assert job.wait(timeout=120) == 0, (tmp_path / "job.txt").read_text()
    finally:
        kill_marked(tmp_path)
        job.wait()
    said = json.loads(report.read_text())
    assert said["verdict"]["state"] != "broken", said["verdict"]
    assert not [finding for finding in said["findings"] if finding["severity"] == "error"]


def _started(folder: Path, name: str, *words: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    environment = marked(os.environ, folder) | {"OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(folder)}
    command = [*prefix, sys.executable, "-m", "ddpdoctor", "profile", "--no-tui", *words]
    with (folder / f"{name}.txt").open("wb") as output:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
