"""``ddpdoctor gate`` as CI runs it: a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.check_command import AT_MOST_S, with_our_tree


def gate(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ddpdoctor", "gate", *arguments],
        cwd=cwd,
        env=with_our_tree(XDG_STATE_HOME=str(cwd / ".state"), **environment),
        capture_output=True,
        text=True,
        timeout=AT_MOST_S,
    )


def report(*arguments: str, cwd: Path) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON report."""
    done = gate(*arguments, "--output-format", "json", cwd=cwd)
    assert done.stdout, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["exit_code"] == done.returncode, done.stderr
    return done.returncode, result
