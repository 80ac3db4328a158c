"""Whatever ends a gate: its report is written, and nothing that it started goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from ddpdoctor.gate.baseline import Entry, Rehearsed, read_baseline, write_entries
from tests.check_command import with_our_tree
from tests.gate.command import gate, report
from tests.gate.scripts import BROKEN, HEALTHY, broken

FOR_EVER = broken("        evaluate(model", "        while True:\n            pass\n        evaluate(model")
FILE = "ddpdoctor-baseline.json"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a baseline that holds nothing."""
    (tmp_path / "train.py").write_text(HEALTHY)
    rehearsed = Rehearsed(ranks=2, layout="1x2", device="cpu", batches=4, batch_size="")
    write_entries(tmp_path / FILE, {"train.py": Entry(rehearsed=rehearsed)})
    return tmp_path


@contextmanager
def started(*arguments: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """A gate that runs, and that is gone afterwards with all of its ranks."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ddpdoctor", "gate", *arguments],
        cwd=cwd,
        env=with_our_tree(XDG_STATE_HOME=str(cwd / ".state")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def inside(folder: Path) -> list[int]:
    """Processes that work in a directory."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and Path(process.cwd()).is_relative_to(folder.resolve()):
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


def test_the_timeout_of_a_ci_finds_a_report_and_no_rank(project: Path) -> None:
    (project / "train.py").write_text(FOR_EVER)
    with started("train.py", "--report", "json=report.json", "--report", "junit=report.xml", cwd=project) as process:
        until = time.monotonic() + 60
        while len(inside(project)) < 4 and time.monotonic() < until:
            time.sleep(0.1)
        told = time.monotonic()
        process.send_signal(signal.SIGTERM)
        while not (project / "report.xml").exists() and time.monotonic() < told + 20:
            time.sleep(0.02)
        took = time.monotonic() - told
        assert process.wait(timeout=20) == 130
    found = json.loads((project / "report.json").read_text())
    assert (found["verdict"], found["exit_code"]) == ("inconclusive", 130)
    assert found["rehearsal"]["reason"] == "it was interrupted"
    assert took < 3.0
    assert inside(project) == []


@pytest.mark.full
def test_the_time_limit_bounds_everything(project: Path) -> None:
    (project / "train.py").write_text(FOR_EVER)
    began = time.monotonic()
    code, found = report("train.py", "--time-limit", "12", cwd=project)
    assert (code, found["verdict"]) in ((3, "inconclusive"), (1, "findings"))
    assert time.monotonic() - began < 30
    assert found["rehearsal"]["status"] == "stopped"
    assert inside(project) == []


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (("train.py", "--", "--note", "two words"), "ddpdoctor gate train.py --update -- --note 'two words'"),
        (("train.py", "--baseline", "b.json"), "ddpdoctor gate train.py --update --baseline b.json"),
        (("--", "torchrun", "train.py", "--lr", "1"), "ddpdoctor gate --update -- torchrun train.py --lr 1"),
    ],
)
def test_what_is_not_agreed_on_yet_comes_with_the_command_that_agrees(
    project: Path, arguments: tuple[str, ...], command: str
) -> None:
    done = gate(*arguments, cwd=project)
    assert done.returncode == 2 and f"`{command}`" in done.stderr


def test_targets_that_the_time_did_not_suffice_for_are_inconclusive(project: Path) -> None:
    (project / "other.py").write_text(HEALTHY)
    entries = read_baseline(project / FILE) or {}
    write_entries(project / FILE, {"other.py": entries["train.py"]})
    code, found = report("train.py", "other.py", "--time-limit", "1", cwd=project)
    assert (code, found["verdict"]) == (3, "inconclusive")
    assert ["time limit of the gate" in part["rehearsal"]["reason"] for part in found["targets"]] == [True, True]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("train.py", "--report", "junit=nowhere/report.xml"), "there is no directory"),
        (("train.py", "--report", "junit=train.py"), "it is the script under examination"),
        (("train.py", "--report", "junnit=report.xml"), "there is no report kind 'junnit'"),
        (("train.py", "--report", "junit"), "has no file name"),
        (("train.py", "--report", "junit=a.xml", "-o", "a.xml"), "two reports name"),
        (("train.py", "other.py"), "other.py does not exist"),
        (("other.py",), "other.py does not exist"),
        (("train.py", "--", "--lr", "1"), "has no entry for `train.py --lr 1`"),
        (("train.py", "--update", "--against", "HEAD"), "either --update or --against, not both"),
        (("train.py", "--allowed-time-growth", "5%"), "goes with `--against`"),
        (("train.py", "--allowed-growth", "much"), "is not a share"),
        (("--watch", "train.py"), "takes the whole command after `--`"),
        ((), "give a script"),
        (("train.py", "--against", "HEAD"), "is not in a git repository"),
    ],
)
def test_wrong_usage_is_one_sentence_before_anything_runs(project: Path, arguments: tuple[str, ...], told: str) -> None:
    done = gate(*arguments, cwd=project, GIT_CEILING_DIRECTORIES=str(project.parent))
    assert (done.returncode, done.stdout) == (2, ""), done.stdout
    assert told in done.stderr.splitlines()[0]
    assert "Traceback" not in done.stderr


@pytest.mark.full
def test_two_gates_at_once_write_both_their_entries(project: Path) -> None:
    (project / "other.py").write_text(HEALTHY)
    with started("train.py", "--update", cwd=project) as one, started("other.py", "--update", cwd=project) as other:
        said = one.communicate(timeout=200)[0], other.communicate(timeout=200)[0]
        assert (one.returncode, other.returncode) == (0, 0), said
    entries = read_baseline(project / FILE) or {}
    assert set(entries) == {"train.py", "other.py"}
    assert all(entry.budget.shares for entry in entries.values())


def test_another_revision_takes_the_place_of_a_baseline(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(["git", *identity, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout

    (tmp_path / "train.py").write_text(HEALTHY)
    git("init", "-q")
    git("add", "train.py")
    git("commit", "-q", "-m", "healthy")
    script, code_wanted, words = BROKEN["collective"]
    (tmp_path / "train.py").write_text(script)
    code, found = report("train.py", "--against", "HEAD", cwd=tmp_path)
    assert code == 1
    (grown,) = [one for one in found["findings"] if one["code"] == code_wanted]
    assert words in grown["title"]
    assert found["gate"]["against"] == "the revision HEAD"
    assert len(git("worktree", "list").splitlines()) == 1
    assert (tmp_path / "train.py").read_text() == script


SUITE = """
import os, sys, time
import torch.distributed as dist
import torch.multiprocessing as mp


def rank_of(rank, port, hangs):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo")
    dist.barrier()
    if hangs and rank == 0:
        dist.barrier()
    if hangs and rank == 1:
        time.sleep(10_000)
    dist.destroy_process_group()


if __name__ == "__main__":
    for test, hangs in enumerate((False, True)):
        print("test", test, flush=True)
        mp.spawn(rank_of, (str(29_600 + os.getpid() % 1000 + test), hangs), nprocs=2)
"""


def test_a_suite_under_watch_is_ended_when_a_test_hangs(tmp_path: Path) -> None:
    """Process groups come and go; the one that stands is told, and nothing of it is left."""
    (tmp_path / "suite.py").write_text(SUITE)
    done = gate("--watch", "--report", "json=report.json", "--", sys.executable, "suite.py", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines() == ["test 0", "test 1"]
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["verdict"] == "findings"
    (finding,) = [one for one in found["findings"] if one["severity"] == "error"]
    assert 1 in finding["ranks"]
    assert "suite.py" in str(finding["locations"])
    assert inside(tmp_path) == []
