"""The runner of the rehearsal on public scripts, on a repository made here."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.real_code.rehearse import Outcome, Start, figures, install, line_of, read_starts, run

SCRIPT = """\
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

assert os.path.exists("words.gz")
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.randn(8, 4)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def test_the_table_names_scripts_by_repository_commit_and_path() -> None:
    starts = read_starts()
    assert len(starts) >= 60 and all(re.fullmatch("[0-9a-f]{40}", start.commit) for start in starts)
    assert all(
        start.path.endswith(".py") and start.path.rpartition("/")[2] in start.command
        for start in starts
        if ("-m " not in start.command)
    )


def test_a_start_is_run_where_it_is_laid_out_and_measured(tmp_path: Path) -> None:
    work = tmp_path / "mirror" / "owner+name" / "repo"
    (work / "examples").mkdir(parents=True)
    (work / "examples" / "train.py").write_text(SCRIPT)
    (work / "examples" / "words.gz").write_bytes(b"words")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for words in (("init", "-q"), ("add", "."), (*identity, "commit", "-q", "-m", "start")):
        subprocess.run(["git", *words], cwd=work, check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=work, check=True, capture_output=True, text=True).stdout
    start = Start(
        repo="owner/name",
        commit=commit.strip(),
        path="examples/train.py",
        command="-- torchrun --nproc_per_node=4 train.py",
        where="examples",
    )
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    outcome = run(start, tmp_path / "mirror", scratch, ("--python", sys.executable, "--time-limit", "240"))
    assert (outcome.trained, outcome.steps, outcome.ranks, outcome.status) == (True, 3, 2, "completed"), outcome
    assert not (scratch / "repository").exists()


@pytest.mark.parametrize(("steps", "reason", "held"), [(2, "", True), (1, "it failed", False), (0, "", False)])
def test_a_bound_that_is_missed_is_said(steps: int, reason: str, held: bool) -> None:
    start = Start(repo="a/b", commit="0" * 40, path="t.py", command="t.py")
    outcome = Outcome(start=start, steps=steps, ranks=2, seconds=3.0, status="failed", reason=reason)
    share, *_, said = figures([outcome])
    assert share[1] == held and said[1] == (held or bool(reason))
    assert line_of(outcome).startswith("ok" if held else "FAIL")


def test_a_script_that_can_train_nowhere_has_only_to_be_explained() -> None:
    start = Start(repo="a/b", commit="0" * 40, path="t.py", command="t.py", cannot="it imports what is not there")
    outcomes = [Outcome(start=start, steps=0, ranks=2, seconds=3.0, status="failed", reason="it failed")]
    share, nowhere, *_ = figures(outcomes)
    assert share[0].startswith("reached 2 steps on every rank: 0 of 0") and nowhere[0].endswith(": 1")
    assert "it cannot train: it imports what is not there" in line_of(outcomes[0])
    *_, said = figures([msgspec.structs.replace(outcomes[0], reason="")])
    assert not said[1]


def test_a_script_of_one_step_is_at_its_end_with_it() -> None:
    start = Start(repo="a/b", commit="0" * 40, path="t.py", command="t.py")
    assert Outcome(start=start, steps=1, ranks=2, status="completed").trained
    assert not Outcome(start=start, steps=1, ranks=2, status="stopped").trained


def test_versions_that_one_start_needs_are_installed_once_beside_the_environment(tmp_path: Path) -> None:
    package = tmp_path / "source"
    package.mkdir()
    (package / "pinned_here.py").write_text("version = 3\n")
    (package / "setup.py").write_text("from setuptools import setup; setup(name='p', py_modules=['pinned_here'])\n")
    place = install([str(package)], sys.executable, tmp_path / "pins")
    assert place is not None and (place / "pinned_here.py").read_text() == "version = 3\n"
    shutil.rmtree(package)
    assert install([str(package)], sys.executable, tmp_path / "pins") == place
    assert install([], sys.executable, tmp_path / "pins") is None
