"""The import contracts hold, and would not if they were violated."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VIOLATIONS = {
    "the core reaches the screen": ("ddpdoctor/cli/check.py", "import ddpdoctor.tui"),
    "the core reaches a check": ("ddpdoctor/examine/one_script.py", "import ddpdoctor.checks.data"),
    "a check starts something": ("checks/data/missing_set_epoch.py", "import ddpdoctor.launch.processes"),
    "the reader of sources imports torch": ("ddpdoctor/source/script/script.py", "import torch"),
    "the diagnosis reaches the monitor": ("ddpdoctor/diagnosis/__init__.py", "import ddpdoctor.monitor"),
    "the diagnosis starts a process": ("ddpdoctor/diagnosis/__init__.py", "import subprocess"),
    "the probe needs a library": ("ddpdoctor/probe/__init__.py", "import msgspec"),
    "the probe needs the model": ("ddpdoctor/probe/__init__.py", "import ddpdoctor.finding"),
    "a report asks for a check": ("ddpdoctor/report/formats/concise.py", "import ddpdoctor.examine.one_script"),
    "the screen asks for a check": ("tui/app.py", "import ddpdoctor.catalogue.registry"),
    "the autopsy runs something": ("ddpdoctor/postmortem/read.py", "import subprocess"),
    "the autopsy asks the diagnosis": ("ddpdoctor/postmortem/read.py", "import ddpdoctor.diagnosis.logs.causes"),
    "the record reaches up": ("ddpdoctor/record/model.py", "import ddpdoctor.monitor"),
}


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Check the contracts of the tree at ``root``."""
    command = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    return subprocess.run(
        (sys.executable, "-c", command, "--no-cache"),
        cwd=root,
        env={"PYTHONPATH": str(root), "PATH": ""},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def copied_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("tree")
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("ddpdoctor", "checks", "tui"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", tree)
    return tree


def test_the_contracts_hold(copied_tree: Path) -> None:
    done = lint_imports(copied_tree)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("violation", VIOLATIONS)
def test_a_violation_breaks_a_contract(violation: str, copied_tree: Path) -> None:
    name, line = VIOLATIONS[violation]
    path = copied_tree / name
    original = path.read_text()
    path.write_text(f"{original}\n{line}\n")
    try:
        done = lint_imports(copied_tree)
    finally:
        path.write_text(original)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "BROKEN" in done.stdout
