"""The hook that pre-commit installs: what it runs is a command that works on the files that it passes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddpdoctor.cli.main import main
from ddpdoctor.errors import ExitCode

HOOKS = Path(__file__).parents[2] / ".pre-commit-hooks.yaml"


def test_the_hook_is_what_pre_commit_expects() -> None:
    lines = re.findall(r"^(?:- |  )(\w+): (.+)$", HOOKS.read_text(), re.MULTILINE)
    fields = dict(lines)
    assert len(lines) == len([line for line in HOOKS.read_text().splitlines() if line.strip()])
    assert fields["id"] == "ddpdoctor"
    assert fields["language"] == "python"
    assert fields["types_or"] == "[python]"
    assert fields["require_serial"] == "true"
    assert fields["entry"] == "ddpdoctor check --static --force-exclude"


def test_the_block_of_the_readme_is_the_same_hook_from_an_installed_command() -> None:
    readme = (HOOKS.parent / "README.md").read_text(encoding="utf-8")
    block = next(block for block in re.findall(r"```yaml\n(.*?)```", readme, re.DOTALL) if "hooks:" in block)
    assert block.startswith("repos:\n  - repo: local\n    hooks:\n      - id: ddpdoctor\n")
    shown = dict(re.findall(r"^ {6}(?:- |  )(\w+): (.+)$", block, re.MULTILINE))
    offered = dict(re.findall(r"^(?:- |  )(\w+): (.+)$", HOOKS.read_text(), re.MULTILINE))
    assert shown == {**{key: offered[key] for key in shown}, "language": "system"}
    assert shown.keys() == offered.keys() - {"description"}


def test_its_command_takes_one_file_or_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ddpdoctor.toml").write_text('exclude = ["generated/"]\n')
    (tmp_path / "generated").mkdir()
    (tmp_path / "tool").write_text("#!/usr/bin/env python3\nimport torch\n")
    (tmp_path / "generated" / "a.py").write_text("import torch\ndef broken(:\n")
    (tmp_path / "module.py").write_text("import os\n")
    _, *arguments = re.findall(r"^  entry: (.+)$", HOOKS.read_text(), re.MULTILINE)[0].split()
    assert main([*arguments, "generated/a.py"]) == ExitCode.CLEAN
    assert main([*arguments, "generated/a.py", "module.py", "tool"]) == ExitCode.CLEAN
