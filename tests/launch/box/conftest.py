"""A box as the powers of its user make it: root's, and that of a user who needs a user namespace."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

InBox = Callable[..., dict[str, Any]]
DRIVER = Path(__file__).parent / "driver.py"
ROOT = Path(__file__).resolve().parents[3]
_POWERS = "-sys_admin,-setuid,-setgid"
WITHOUT_POWER = ["setpriv", f"--bounding-set={_POWERS}", f"--inh-caps={_POWERS}"]


@pytest.fixture(params=["as root", "as a user"])
def in_box(request: pytest.FixtureRequest, tmp_path: Path) -> InBox:
    """Run a shell command in a box, in a directory of the test's own; skips where the kernel allows no box."""
    prefix: list[str] = []
    if request.param == "as root" and os.geteuid() != 0:
        pytest.skip("the tests do not run as root")
    if request.param == "as a user" and os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("there is no setpriv to give up root's powers")
        prefix = WITHOUT_POWER

    def run(command: str, *options: str, directory: Path = tmp_path, **variables: str) -> dict[str, Any]:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)} | variables
        words = [*prefix, sys.executable, str(DRIVER), command, *options]
        done = subprocess.run(words, cwd=directory, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        if "refused" in answer:
            pytest.skip(f"no box can be made here: {answer['refused']}")
        return answer

    return run
