"""Ends the jobs that a test started: every process of them, whichever session its launcher gave it.

torchrun gives each rank a session of its own, so that no signal to a group reaches all of them, and ranks outlive a
launcher that is killed. They all inherit the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

_MARK = "TESTED_IN"


def marked(environment: Mapping[str, str], directory: Path) -> dict[str, str]:
    """The environment for a job of the test that has this directory."""
    return {**environment, _MARK: str(directory)}


def kill_marked(directory: Path) -> None:
    """Kill what is left of the jobs of the test that has this directory."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(_MARK) == str(directory):
                process.kill()
