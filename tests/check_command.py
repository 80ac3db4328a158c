"""``ddpdoctor check`` of this tree as a user runs it: a process of its own, whose report and exit code are read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
AT_MOST_S = 600.0


def with_our_tree(**environment: str) -> dict[str, str]:
    """An environment in which this tree is examined, wherever a command is run."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **environment}


def check(
    *arguments: str, cwd: Path, python: str = sys.executable, command: str = "check", **environment: str
) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON report; without the comparison with one process unless it is asked for."""
    if command == "check" and not {"--static", "--equivalence", "--against", "--thorough"} & set(arguments):
        arguments = ("--no-equivalence", *arguments)
    done = subprocess.run(
        [python, "-m", "ddpdoctor", command, "--output-format", "json", *arguments],
        cwd=cwd,
        env=with_our_tree(**environment),
        capture_output=True,
        text=True,
        timeout=AT_MOST_S,
    )
    assert done.stdout, done.stderr
    assert done.stderr == "", done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["exit_code"] == done.returncode
    return done.returncode, report
