"""Completion as bash asks for it, with the script that ``ddpdoctor completion bash`` prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddpdoctor.cli.main import main

ASK = """
ddpdoctor() { %(python)s -m ddpdoctor "$@"; }
source <(ddpdoctor completion bash)
compopt() { COMPREPLY+=("(${@: -1})"); }
COMP_WORDS=(%(words)s); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_ddpdoctor_completion %(program)s
printf '%%s\n' "${COMPREPLY[@]}"
"""
"""``compopt`` works only while a user types: it is replaced by what it was told."""


def _asked(folder: Path, words: str) -> list[str]:
    program = folder / "ddpdoctor"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} -m ddpdoctor\n")
    program.chmod(0o755)
    state = {**os.environ, "XDG_STATE_HOME": str(folder.parent / "state")}
    text = ASK % {"python": sys.executable, "words": words, "program": program}
    done = subprocess.run(("bash", "-c", text), cwd=folder, env=state, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("ddpdoctor rep", ["report"]),
        ("ddpdoctor check tr", ["(default)"]),
        ("ddpdoctor check --output-f", ["--output-format"]),
        ("ddpdoctor check --output-format js", ["json"]),
        ("ddpdoctor explain ddp30", [f"DDP30{number}" for number in range(1, 10)]),
        ("ddpdoctor explain missing-set", ["missing-set-epoch", "missing-set-device"]),
        ("ddpdoctor report run-2026", ["run-20260101-000000-abcdefgh"]),
        ("ddpdoctor report ./", ["(dirnames)"]),
        ("ddpdoctor profile tr", ["(default)"]),
        ("ddpdoctor profile --no-t", ["--no-tui"]),
        ("ddpdoctor profile -- torchrun tr", ["(default)"]),
    ],
)
def test_bash_completes(tmp_path: Path, words: str, completed: list[str]) -> None:
    run = tmp_path / "state" / "ddpdoctor" / "runs" / "run-20260101-000000-abcdefgh"
    run.mkdir(parents=True)
    (run / "job.json").write_text("{}")
    folder = tmp_path / "project"
    folder.mkdir()
    assert _asked(folder, words) == completed


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_a_script(shell: str) -> None:
    done = subprocess.run(
        (sys.executable, "-m", "ddpdoctor", "completion", shell), capture_output=True, text=True, check=True
    )
    assert f"_DDPDOCTOR_COMPLETE={shell}_complete" in done.stdout and done.stderr == ""


def test_it_goes_to_a_file_which_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "ddpdoctor.bash"
    assert main(["completion", "bash", "-o", str(file)]) == 0
    assert "_ddpdoctor_completion()" in file.read_text()
    file.write_text("mine")
    assert main(["completion", "bash", "-o", str(file)]) == 2
    assert file.read_text() == "mine"
    assert main(["completion", "bash", "--force", "-o", str(file)]) == 0
    assert "_ddpdoctor_completion()" in file.read_text()
