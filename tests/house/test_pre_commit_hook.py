"""The hook that pre-commit installs: what it runs is a command that works on the files that it passes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddpdoctor.cli.main import main
from ddpdoctor.errors import ExitCode

HOOKS = Path(__file__).parents[2] / ".pre-commit-hooks.yaml"


def test_the_hooks_are_what_pre_commit_expects() -> None:
    hooks = _hooks()
    assert list(hooks) == ["ddpdoctor", "ddpdoctor-project", "ddpdoctor-gate"]
    assert hooks["ddpdoctor"]["language"] == "python"
    assert hooks["ddpdoctor"]["entry"] == "ddpdoctor check --static --force-exclude --only-findings"
    for hook in hooks.values():
        assert hook["types_or"] == ["python"]
        assert hook["require_serial"] is True, "one process of ours reads files in several of its own"


def test_the_block_of_the_documents_is_the_same_hook_from_an_installed_command() -> None:
    page = (HOOKS.parent / "docs" / "settings.md").read_text(encoding="utf-8")
    block = next(block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "hooks:" in block)
    (repository,) = yaml.safe_load(block)["repos"]
    assert repository["repo"] == "local"
    (shown,) = repository["hooks"]
    offered = _hooks()["ddpdoctor"]
    assert shown == {**{key: offered[key] for key in shown}, "language": "system"}
    assert shown.keys() == offered.keys() - {"description"}


def _hooks() -> dict[str, dict[str, Any]]:
    return {hook["id"]: hook for hook in yaml.safe_load(HOOKS.read_text(encoding="utf-8"))}


def test_its_command_takes_one_file_or_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ddpdoctor.toml").write_text('exclude = ["generated/"]\n')
    (tmp_path / "generated").mkdir()
    (tmp_path / "tool").write_text("#!/usr/bin/env python3\nimport torch\n")
    (tmp_path / "generated" / "a.py").write_text("import torch\ndef broken(:\n")
    (tmp_path / "module.py").write_text("import os\n")
    _, *arguments = _hooks()["ddpdoctor"]["entry"].split()
    assert main([*arguments, "generated/a.py"]) == ExitCode.CLEAN
    assert main([*arguments, "generated/a.py", "module.py", "tool"]) == ExitCode.CLEAN
