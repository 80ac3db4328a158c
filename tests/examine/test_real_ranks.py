"""``ddpdoctor check`` as a user runs it, on scripts that end in every way but the good one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from ddpdoctor.examine.one_script import ExamineRequest, examine
from ddpdoctor.launch.created_files import clean_up, leftovers
from tests.check_command import check, with_our_tree

TRAINING = """
import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    AT_THE_START
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    data = TensorDataset(torch.randn(64, 4))
    sampler = DistributedSampler(data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (batch,) in DataLoader(data, batch_size=4, sampler=sampler):
            IN_A_STEP
            model(batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""
NO_DDP = """
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    print("nothing to train")
dist.destroy_process_group()
"""
NO_WORKER = """
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def work(rank, world_size):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "29511"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    DistributedDataParallel(torch.nn.Linear(1, 1))
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, args=(0,), nprocs=0)
"""
ARGUMENTS = "p = argparse.ArgumentParser(); p.add_argument('--data', required=True); p.parse_args()"
LATER = "time.sleep(0.7 * int(os.environ['RANK'])); open('missing.bin')"
"""The launcher ends a rank 0.1 s after another has failed."""
WITHOUT_THE_PROBE = """
import os
import sys

if not sys.flags.ignore_environment:
    os.execv(sys.executable, [sys.executable, "-E", *sys.argv])
"""


def training(at_the_start: str = "pass", in_a_step: str = "pass") -> str:
    """A script that trains, with a line put in at its start or in each step."""
    return TRAINING.replace("AT_THE_START", at_the_start).replace("IN_A_STEP", in_a_step)


@pytest.mark.parametrize(
    ("text", "reason", "output"),
    [
        (training("open('missing.bin')"), "raised FileNotFoundError at train.py:15", "missing.bin"),
        (training(LATER), "ranks 0 and 1 raised FileNotFoundError at train.py:15", "missing.bin"),
        (training(ARGUMENTS), "left with exit code 2", "the following arguments are required: --data"),
        (NO_DDP, "without wrapping a model in DistributedDataParallel", "nothing to train"),
        (NO_WORKER, "the script started no rank", ""),
        ("print('hello')", "the script never imported torch", "hello"),
        (WITHOUT_THE_PROBE + training(), "0 of 2 ranks reported", ""),
    ],
    ids=[
        "no data set",
        "no data set, which one rank sees later",
        "missing arguments",
        "no DDP",
        "mp.spawn without a worker",
        "no torch in it",
        "python -E",
    ],
)
def test_a_rehearsal_that_shows_nothing_is_inconclusive_with_the_words_of_the_script(
    text: str, reason: str, output: str, tmp_path: Path
) -> None:
    code, report = check_text(tmp_path, text)
    assert code == 3
    assert (report["verdict"], report["complete"], report["findings"]) == ("inconclusive", False, [])
    assert report["rehearsal"]["status"] == "failed"
    assert reason in report["rehearsal"]["reason"]
    assert output in report["rehearsal"]["output"]
    assert "--static" in report["rehearsal"]["hint"]


def test_the_arguments_behind_the_dashes_reach_the_script(tmp_path: Path) -> None:
    code, report = check_text(tmp_path, training(ARGUMENTS), "--", "--data", "x")
    assert code == 0
    assert (report["verdict"], report["complete"]) == ("clean", True)
    assert report["rehearsal"]["status"] == "completed"
    assert report["rehearsal"]["steps"] >= 2


def test_the_exception_of_one_rank_is_the_headline(tmp_path: Path) -> None:
    code, report = check_text(tmp_path, training(in_a_step="assert dist.get_rank() == 0, 'rank one is bad'"))
    assert code == 1
    (finding,) = report["findings"]
    assert finding["code"] == "DDP706"
    assert "AssertionError" in finding["title"]
    assert "rank one is bad" in finding["title"]
    assert finding["ranks"] == [1]
    assert finding["locations"][0]["file"] == "train.py"


def test_without_torch_the_source_is_still_read_and_one_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpdoctor.launch.interpreter.importlib.util.find_spec", lambda name: None)
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "UV_PROJECT_ENVIRONMENT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("from torch.nn import DataParallel\n")
    examination = examine(ExamineRequest(target="train.py"))
    assert (examination.exit_code, examination.source.status) == (3, "read")
    assert "torch is not installed" in examination.rehearsal.reason
    assert "torch" in examination.rehearsal.hint


def test_a_named_python_without_torch_is_a_usage_error(tmp_path: Path) -> None:
    subprocess.run((sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"), check=True)
    (tmp_path / "train.py").write_text("import torch\n")
    command = (sys.executable, "-m", "ddpdoctor", "check", "--python", "venv", "train.py")
    done = subprocess.run(command, cwd=tmp_path, env=with_our_tree(), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --python venv: has no torch\n")


ASLEEP_NAME = f"asleep-{os.getpid()}"
ASLEEP = f"open('/proc/self/comm', 'w').write('{ASLEEP_NAME}'); time.sleep(60)"
"""The name is seen from outside, too, where in an overlay no file is."""


@pytest.mark.parametrize(("number", "mode"), [(signal.SIGINT, "--overlay"), (signal.SIGTERM, "--no-overlay")])
def test_an_interrupt_ends_everything_within_3_seconds(number: signal.Signals, mode: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(training(in_a_step=ASLEEP))
    process = subprocess.Popen(
        (sys.executable, "-m", "ddpdoctor", "check", mode, "train.py"),
        cwd=tmp_path,
        env=with_our_tree(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # What is started in the background of a shell script ignores Ctrl-C, and so does all that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    pids = _wait_for_ranks(2)
    interrupted_s = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    # On a machine with more to do than cores each process gets a share of one only.
    assert time.monotonic() - interrupted_s < 3 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    assert process.returncode == 130, err
    assert out == ""
    assert err.strip().endswith("interrupted")
    assert [pid for pid in pids if _lives(pid)] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


@pytest.mark.parametrize(
    ("where", "mode"),
    [("before the ranks meet", "--no-overlay"), ("in a step", "--no-overlay"), ("in a step", "--overlay")],
)
def test_nothing_outlives_a_doctor_who_is_killed(where: str, mode: str, tmp_path: Path) -> None:
    state = tmp_path / "state"
    project = tmp_path / "project"
    project.mkdir()
    early = f"import os, time; {ASLEEP}\n" + training()
    (project / "train.py").write_text(early if where == "before the ranks meet" else training(in_a_step=ASLEEP))
    environment = with_our_tree(XDG_STATE_HOME=str(state))
    command = (sys.executable, "-m", "ddpdoctor", "check", mode, "train.py")
    process = subprocess.Popen(command, cwd=project, env=environment)
    pids = _wait_for_ranks(2)
    process.kill()
    process.wait()
    deadline_s = time.monotonic() + 30
    while any(_lives(pid) for pid in pids) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert [pid for pid in pids if _lives(pid)] == []
    left = list((state / "ddpdoctor" / "runs").iterdir())
    assert len(left) == 1, "nobody was left to remove the run directory"
    with mock.patch.dict(os.environ, {"XDG_STATE_HOME": str(state)}):
        for each in leftovers():  # without an overlay what torch made in the temporary directory
            clean_up(each)
    assert not left[0].exists()
    assert sorted(path.name for path in project.iterdir()) == ["train.py"]


def check_text(directory: Path, text: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Check ``text`` as ``train.py`` in ``directory``; exit code and JSON report."""
    (directory / "train.py").write_text(text)
    return check("train.py", *arguments, cwd=directory)


def _wait_for_ranks(count: int) -> list[int]:
    """Wait until as many ranks are asleep, and return their process numbers."""
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        pids = [process.pid for process in psutil.process_iter(["name"]) if process.info["name"] == ASLEEP_NAME]
        if len(pids) == count:
            return pids
        time.sleep(0.05)
    raise AssertionError("the ranks did not start to train")


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("before", "change"),
    [
        ("plan = torch.optim.lr_scheduler.StepLR(optimizer, 1)", "plan.step()"),
        ("rates = optimizer.param_groups", "rates[0]['lr'] = 0.5"),
    ],
    ids=["a scheduler", "a setting"],
)
def test_a_change_on_one_rank_and_the_replicas_that_it_parts_are_one_finding(
    before: str, change: str, tmp_path: Path
) -> None:
    text = TRAINING.replace("AT_THE_START", "pass").replace("IN_A_STEP", "pass")
    text = text.replace("    for epoch", f"    {before}\n    for epoch")
    text = text.replace("    dist.destroy", f"        if dist.get_rank() == 0:\n            {change}\n    dist.destroy")
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    report = examine(ExamineRequest(target=str(tmp_path / "train.py")))
    (found,) = [one for one in report.findings if one.code == "DDP208"]
    assert {"source", "rehearsal"} <= found.basis
    assert found.unconfirmed == ""
    told = {fact.location.line for fact in found.evidence if fact.location is not None}
    assert next(i for i, one in enumerate(text.splitlines(), 1) if "get_rank() == 0" in one) in told
