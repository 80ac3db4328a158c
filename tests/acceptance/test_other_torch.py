"""The bundled examples, every fault, every healthy script and what is measured on the torch of other interpreters.

``DDPDOCTOR_OTHER_TORCH=/venvs/2.4/bin/python:/venvs/2.8/bin/python python -m pytest -m full tests/acceptance`` runs
them. Each interpreter needs torch and numpy and nothing of ours.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.acceptance.examples import EXAMPLES
from tests.check_command import ROOT, check
from tests.faults.cases import FAULTS
from tests.faults.healthy import HEALTHY, examine_healthy
from tests.faults.judge import run_fault
from tests.truth.test_truth import assert_true_on

VARIABLE = "DDPDOCTOR_OTHER_TORCH"
OTHERS = [path for path in os.environ.get(VARIABLE, "").split(os.pathsep) if path]

PATIENCE = 3.0
"""Times the usual time limit: a CUDA build of torch has 1.5 to 2 GB, and as much again of CUDA's libraries, to load."""

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
on_each_torch = pytest.mark.parametrize(
    "python", OTHERS or [pytest.param("", marks=pytest.mark.skip(reason=f"{VARIABLE} names no interpreter"))]
)


@on_each_torch
@pytest.mark.parametrize("name", EXAMPLES)
def test_each_example_gives_the_same_on_another_torch(name: str, python: str, tmp_path: Path) -> None:
    code, verdict, status, findings = EXAMPLES[name]
    limit = ("--time-limit", str(int(PATIENCE * 120)))
    exit_code, report = check("--python", python, *limit, str(ROOT / "examples" / name), cwd=tmp_path)
    found = [(finding["code"], finding["severity"], sorted(finding["basis"])) for finding in report["findings"]]
    assert (found, report["verdict"], exit_code) == (findings, verdict, code)
    assert report["rehearsal"]["status"] == status


@on_each_torch
@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_named_on_another_torch(
    name: str, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _work_in(tmp_path, monkeypatch)
    assert run_fault(FAULTS[name], tmp_path, python=python, patience=PATIENCE).wrong == ""


@on_each_torch
@pytest.mark.parametrize("name", HEALTHY)
def test_correct_code_is_left_alone_on_another_torch(
    name: str, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _work_in(tmp_path, monkeypatch)
    wrong = examine_healthy(HEALTHY[name], tmp_path, python=python, time_limit_s=PATIENCE * 120)
    if wrong and _fails_by_itself(python, tmp_path):
        # Before some torch, DDP's broadcast of buffers between two forwards broke the backward of the first.
        pytest.skip(f"not correct on this torch, which refuses it without ddpdoctor, too: {wrong}")
    assert wrong == ""


@on_each_torch
def test_what_is_measured_is_what_happened_on_another_torch(python: str, tmp_path: Path) -> None:
    assert_true_on(python, tmp_path)


def _fails_by_itself(python: str, directory: Path) -> bool:
    """Tell whether the script of a directory ends with an error where nothing watches it."""
    launch = (python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")
    return subprocess.run(launch, cwd=directory, capture_output=True, timeout=600).returncode != 0


def _work_in(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)
    monkeypatch.setenv("XDG_STATE_HOME", str(directory / "state"))
