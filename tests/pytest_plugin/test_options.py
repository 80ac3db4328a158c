"""The plugin with what else a pytest may be asked for: each in a session of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pytest_plugin.session import ALONE, processes_of, run_pytest

OURS = """
def used_on_ranks(rank):
    if rank == 0:
        return "first"
    return "other"

def used_alone():
    return "alone"

def used_by_nobody():
    return "nothing"
"""
MEASURED = """
import pytest
import ours

@pytest.mark.ddp
def test_each_way(ddp_rank):
    assert ours.used_on_ranks(int(ddp_rank)) in ("first", "other")

@pytest.mark.ddp(nproc=1)
def test_alone(ddp_rank):
    assert ours.used_alone() == "alone"

@pytest.mark.ddp(nproc=1)
def test_fails(ddp_rank):
    print("said on the rank")
    assert ddp_rank == 7
"""


def test_workers_of_xdist_measure_what_the_ranks_run(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    pytest.importorskip("pytest_cov")
    (tmp_path / "ours.py").write_text(OURS)
    (tmp_path / "test_measured.py").write_text(MEASURED)
    session = run_pytest(tmp_path, "-n", "2", "--cov=ours", "--cov-report=json")
    assert session.outcomes == {"test_each_way": "passed", "test_alone": "passed", "test_fails": "failed"}, (
        session.output
    )
    assert "every rank failed: assert 0 == 7" in session.messages["test_fails"]
    assert "said on the rank" in session.output
    told = json.loads((tmp_path / "coverage.json").read_text())["files"]["ours.py"]
    assert told["missing_lines"] == [OURS.splitlines().index('    return "nothing"') + 1], (told, session.output)
    assert list(tmp_path.glob(".coverage.*")) == []


@pytest.mark.parametrize(("options", "at_the_end"), [((), 4000), (("--pdb-rank", "1"), 4100)])
def test_the_debugger_stops_on_rank_0_or_the_one_named_and_minus_x_after_it(
    options: tuple[str, ...], at_the_end: int, tmp_path: Path
) -> None:
    (tmp_path / "test_debugged.py").write_text(
        """
import pytest

@pytest.mark.ddp
def test_stops(ddp_rank):
    import torch.distributed as dist
    found = 40 + ddp_rank
    breakpoint() if ddp_rank == 1 else None
    dist.barrier()
    assert found == 2

@pytest.mark.ddp
def test_is_not_run(): pass
"""
    )
    done = subprocess.run(
        [*ALONE, "-x", "--pdb", *options, "-p", "no:timeout", f"--rootdir={tmp_path}"],
        cwd=tmp_path,
        input="print('at the line', found)\nc\nprint('at the end', found * 100)\nc\n",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "at the line 41" in done.stdout, done.stdout + done.stderr
    before, asked, _ = done.stdout.partition(f"at the end {at_the_end}")
    assert asked and f"AssertionError: assert {at_the_end // 100} == 2" in before, "what failed is said at the prompt"
    assert "1 failed" in done.stdout
    assert "test_is_not_run" not in done.stdout


def test_modules_that_start_threads_run_in_processes_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "test_threads.py").write_text(
        """
import threading
import pytest

threading.Thread(target=threading.Event().wait, daemon=True).start()
left = []

@pytest.mark.ddp
@pytest.mark.parametrize("turn", [0, 1])
def test_starts_anew(turn, ddp_rank):
    import torch.distributed as dist
    assert left == [] and threading.active_count() >= 2
    left.append(turn)
    dist.barrier()
"""
    )
    session = run_pytest(tmp_path)
    assert session.outcomes == {"test_starts_anew[0]": "passed", "test_starts_anew[1]": "passed"}, session.output


def test_nothing_outlives_a_pytest_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "test_killed.py").write_text(
        """
import pathlib
import subprocess
import pytest

@pytest.mark.ddp
def test_waits(ddp_rank):
    import time
    subprocess.Popen(["sleep", "86398"], start_new_session=True)
    pathlib.Path(f"begun-{ddp_rank:d}").touch()
    time.sleep(600)
"""
    )
    places = tmp_path / "temporary"
    places.mkdir()
    environment = {**os.environ, "KILLED_IN": str(tmp_path), "TMPDIR": str(places)}
    process = subprocess.Popen(
        [*ALONE, f"--rootdir={tmp_path}"], cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL
    )
    try:
        _wait_for(lambda: (tmp_path / "begun-0").exists() and (tmp_path / "begun-1").exists())
        assert list(places.glob("ddpdoctor-pytest-*"))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    _wait_for(lambda: not processes_of(f"KILLED_IN={tmp_path}"))
    _wait_for(lambda: not list(places.glob("ddpdoctor-pytest-*")))


def test_a_pytest_without_the_mark_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "test_plain.py").write_text(
        """
import sys
import unittest

def test_nothing_is_imported():
    ours = {name for name in sys.modules if name.partition(".")[0] in ("torch", "msgspec", "psutil", "numpy")}
    assert ours == set()

class TestCase(unittest.TestCase):
    def test_case(self): pass

def test_the_rehearsal_is_the_public_function(ddp_rehearsal):
    import ddpdoctor
    assert ddp_rehearsal is ddpdoctor.rehearse
"""
    )
    session = run_pytest(tmp_path, "--strict-markers", "-W", "error")
    assert (session.code, set(session.outcomes.values())) == (0, {"passed"}), session.output


BAD = {
    "no_rank": ("nproc=0", "def {}(): pass", "needs 1 to 64 ranks, not 0"),
    "ranks_as_text": ("nproc='2'", "def {}(): pass", "needs 1 to 64 ranks, not '2'"),
    "no_time": ("timeout=-1", "def {}(): pass", "needs a timeout in seconds, not -1"),
    "no_device": ("device='gpu'", "def {}(): pass", "knows the devices cpu, stand-in, cuda, not 'gpu'"),
    "no_option": ("ranks=2", "def {}(): pass", "takes nproc, timeout, device and init"),
    "coroutine": ("", "async def {}(): pass", "cannot run a coroutine"),
    "case": ("", "class TestIt(unittest.TestCase):\n    def {}(self): pass", "is for test functions"),
    "early": ("", "def {}(late): pass", "ddp_rank is known on the ranks only"),
    "no_gpus": ("nproc=64, device='cuda'", "def {}(): pass", "needs 64 GPUs"),
}


def test_what_the_mark_cannot_mean_is_said(tmp_path: Path) -> None:
    lines = ["import unittest", "import pytest", "@pytest.fixture", "def late(ddp_rank): return ddp_rank + 1"]
    for name, (mark, body, _) in BAD.items():
        lines += [f"@pytest.mark.ddp({mark})", body.format(f"test_{name}")]
    (tmp_path / "test_bad.py").write_text("\n".join(lines))
    session = run_pytest(tmp_path, "-W", "ignore")
    for name, (_, _, said) in BAD.items():
        assert said in session.messages.get(f"test_{name}", "passed"), session.output


def _wait_for(is_so: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)
