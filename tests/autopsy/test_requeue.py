"""The end of a batch script, as ``docs/autopsy.md`` has it, decides by the autopsy; Slurm's commands are stubs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.skipif(shutil.which("jq") is None, reason="the script reads JSON with jq")
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
    for name, line in {
        "srun": "exit 3",
        "scontrol": 'echo "$*" >> calls',
        "ddpdoctor": f'exec {sys.executable} -m ddpdoctor "$@"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "77", "PYTHONPATH": str(PAGE.parents[1])},
        timeout=60,
        check=False,
    )
    calls = tmp_path / "calls"
    assert (calls.read_text().splitlines() if calls.exists() else []) == called
    assert done.returncode == 3
