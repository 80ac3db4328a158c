"""The manual page says what the commands' own help says."""

from __future__ import annotations

import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from ddpdoctor.cli.main import COMMANDS

HOOK = Path(__file__).parents[2] / "docs" / "hooks" / "manual.py"


def test_the_page_is_as_the_commands_say() -> None:
    hook = runpy.run_path(str(HOOK))
    assert hook["PAGE"].read_text() == hook["manual"](), "run `python docs/hooks/manual.py`"


@pytest.mark.skipif(shutil.which("groff") is None, reason="needs groff")
def test_troff_has_nothing_to_complain_about() -> None:
    page = HOOK.parents[1] / "ddpdoctor.1"
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-P-c", "-P-b", "-P-u", "-ww", page], capture_output=True, text=True
    )
    assert done.stderr == ""
    for name in COMMANDS:
        assert f"\n   ddpdoctor {name} " in done.stdout
    assert "nproc N\n" in done.stdout
