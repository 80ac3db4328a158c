"""``ddpdoctor runs`` on runs that were really watched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest

from ddpdoctor.cli.schema import schema_of
from tests.jobs_of_tests import kill_marked, marked

JOB = """
import sys, time, pathlib
import torch
from torch import distributed, nn
distributed.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
if len(sys.argv) > 1:
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(300)
"""


def _environment(folder: Path) -> dict[str, str]:
    return marked({**os.environ, "XDG_STATE_HOME": str(folder / "state")}, folder)


def _run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "ddpdoctor", *words)
    return subprocess.run(command, cwd=folder, env=_environment(folder), capture_output=True, text=True, check=False)


def _profile(*arguments: str) -> tuple[str, ...]:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")
    return ("profile", "--no-tui", "--", *launcher, "train.py", *arguments)


def test_runs_are_listed_and_removed_but_for_one_that_lives_and_for_what_others_put_there(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(JOB)
    empty = _run(tmp_path, "runs")
    assert (empty.returncode, empty.stdout[:24]) == (0, "No run has been recorded")
    _run(tmp_path, *_profile())
    live = subprocess.Popen(
        (sys.executable, "-m", "ddpdoctor", *_profile("ready")),
        cwd=tmp_path,
        env=_environment(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + 120
        while not (tmp_path / "ready").exists():
            assert time.monotonic() < until and live.poll() is None
            time.sleep(0.05)
        told = json.loads(_run(tmp_path, "runs", "--output-format", "json").stdout)
        jsonschema.validate(told, schema_of("runs"))
        running, over = told["runs"]
        assert (running["verdict"], running["script"]) == ("live", "train.py")
        assert (over["ranks"], over["steps"], over["verdict"], over["note"]) == (1, 5, "UNKNOWN", "")
        table = _run(tmp_path, "runs").stdout.splitlines()
        assert [line.split()[0] for line in table] == ["NAME", running["name"], over["name"]]
        assert _run(tmp_path, "report", over["name"]).returncode == 0
        assert [_run(tmp_path, "runs", "-o", "list.txt").returncode for _ in range(2)] == [0, 0]
        # The job that lives makes steps in between.
        assert [line.split()[0] for line in (tmp_path / "list.txt").read_text().splitlines()[:3]] == [
            line.split()[0] for line in table
        ]

        refused = _run(tmp_path, "runs", "--delete", running["name"])
        assert (refused.returncode, "its job is still running" in refused.stderr) == (2, True)
        assert Path(running["directory"]).is_dir() and live.poll() is None
    finally:
        kill_marked(tmp_path)
        live.wait()

    (Path(over["directory"]) / "thesis.txt").write_text("mine")
    stays = _run(tmp_path, "runs", "--delete", over["name"])
    assert (stays.returncode, "files that the run did not write" in stays.stderr) == (2, True)
    assert [path.name for path in Path(over["directory"]).iterdir()] == ["thesis.txt"]
    removed = _run(tmp_path, "runs", "--delete", running["name"])
    assert (removed.returncode, removed.stdout) == (0, f"removed {running['name']}\n")
    assert not Path(running["directory"]).exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [(("nosuch",), "there is no kept run nosuch"), (("--delete",), "--delete needs the names of runs")],
)
def test_a_name_that_is_none_gets_a_sentence(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    done = _run(tmp_path, "runs", *words)
    assert done.returncode == 2 and message in done.stderr and "`ddpdoctor runs` lists them" in done.stderr


def test_a_damaged_run_is_listed_with_the_reason(tmp_path: Path) -> None:
    directory = tmp_path / "state" / "ddpdoctor" / "runs" / "run-20260101-000000-abcdefgh"
    directory.mkdir(parents=True)
    (directory / "job.json").write_text("{")
    listed = _run(tmp_path, "runs")
    assert listed.returncode == 0 and "2026-01-01 00:00" in listed.stdout
    assert "run-20260101-000000-abcdefgh cannot be read: " in listed.stdout and "Traceback" not in listed.stderr
