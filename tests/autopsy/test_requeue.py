"""What ``docs/autopsy.md`` has for launchers decides by the autopsy; commands of Slurm and torchrun are stubs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.documents.blocks import blocks_of

PAGE = Path(__file__).parents[2] / "docs" / "autopsy.md"
TAKEN = (
    "rank 0 of 2\nRuntimeError: The server socket has failed to listen on any local network address. "
    "The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).\n"
)
BROKEN = (
    'rank 0 of 2\nTraceback (most recent call last):\n  File "/w/a.py", line 3, in <module>\n    f()\nKeyError: 1\n'
)
FALLEN = (
    "Mar  2 13:00:01 node7 kernel: NVRM: Xid (PCI:0000:4a:00): 79, pid=34, name=python, GPU has fallen off the bus.\n"
)
REQUEUED = "requeue 77"


needs_jq = pytest.mark.skipif(shutil.which("jq") is None, reason="the script reads JSON with jq")


@needs_jq
@pytest.mark.parametrize(
    ("log", "called"),
    [
        (TAKEN, [REQUEUED]),
        (BROKEN, []),
        (FALLEN, ["update JobId=77 ExcNodeList=node7", REQUEUED]),
    ],
    ids=["a port in use", "a defect of the script", "a GPU of a node"],
)
def test_a_batch_script_starts_again_what_may_pass(log: str, called: list[str], tmp_path: Path) -> None:
    (script,) = (block.text for block in blocks_of(PAGE) if "requeue" in block.text and block.language == "sh")
    (tmp_path / "slurm-77.out").write_text(log)
    done = run_with_stubs(script, {"srun": "exit 3", "scontrol": 'echo "$*" >> calls'}, tmp_path)
    calls = tmp_path / "calls"
    assert (calls.read_text().splitlines() if calls.exists() else []) == called
    assert done == 3


def run_with_stubs(script: str, stubs: dict[str, str], directory: Path) -> int:
    for name, line in {**stubs, "ddpdoctor": f'exec {sys.executable} -m ddpdoctor "$@"'}.items():
        (directory / name).write_text(f"#!/bin/sh\n{line}\n")
        (directory / name).chmod(0o755)
    return subprocess.run(
        ["bash", "-c", script],
        cwd=directory,
        env={
            "PATH": f"{directory}:/usr/bin:/bin", "SLURM_JOB_ID": "77", "PYTHONPATH": str(PAGE.parents[1]),
            "MESSAGE": "message",
        },
        timeout=60,
        check=False,
    ).returncode  # fmt: skip


@needs_jq
@pytest.mark.parametrize(("log", "starts"), [(TAKEN, 3), (BROKEN, 1)], ids=["a port in use", "a defect of the script"])
def test_a_loop_around_torchrun_ends_where_it_would_happen_again(log: str, starts: int, tmp_path: Path) -> None:
    (script,) = (block.text for block in blocks_of(PAGE) if "for attempt" in block.text and block.language == "sh")
    (tmp_path / "said").write_text(log)
    assert run_with_stubs(script, {"torchrun": "cat said; echo x >> starts; exit 1"}, tmp_path) == 1
    assert (tmp_path / "starts").read_text().count("x") == starts


@needs_jq
@pytest.mark.parametrize(
    ("log", "action", "advice"),
    [
        (TAKEN, "Ignore", "retry"),
        (BROKEN, "FailJob", "fix-the-script"),
        (FALLEN, None, "replace-the-node"),
    ],
    ids=["a port in use", "a defect of the script", "a GPU of a node"],
)
def test_a_pod_tells_kubernetes_what_to_do(log: str, action: str | None, advice: str, tmp_path: Path) -> None:
    (block,) = (block for block in blocks_of(PAGE) if block.language == "yaml")
    job = yaml.safe_load(block.text)["spec"]
    (container,) = job["template"]["spec"]["containers"]
    (tmp_path / "said").write_text(log)
    code = run_with_stubs(container["args"][0], {"torchrun": "cat said; exit 3"}, tmp_path)
    rules = {
        value: rule["action"] for rule in job["podFailurePolicy"]["rules"] for value in rule["onExitCodes"]["values"]
    }
    assert rules.get(code) == action and (action is not None or code == 3)
    assert f'"advice":"{advice}"' in (tmp_path / "message").read_text()
