from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.jobs_of_tests import kill_marked, marked
from tests.what_if.measure import SCRIPT

Ddpdoctor = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory of its own, whose jobs are ended with it."""
    directory = tmp_path_factory.mktemp("what-if")
    yield directory
    kill_marked(directory)


@pytest.fixture(scope="session")
def ddpdoctor(place: Path) -> Ddpdoctor:
    """The real command, with runs kept in a place of its own."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**marked(os.environ, place), "XDG_STATE_HOME": str(place / "state"), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, "-m", "ddpdoctor", *arguments],
            env=environment,
            cwd=place,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    return run


def _profiled(ddpdoctor: Ddpdoctor, place: Path, name: str, spec: str) -> Path:
    run = place / name
    arguments = ("profile", "--no-tui", "--nproc", "2", "--run-dir", str(run), str(SCRIPT))
    told = ddpdoctor(*arguments, "--", str(place / f"{name}-told"), "40", spec)
    assert (run / "job.json").exists(), told.stderr
    return run


@pytest.fixture(scope="session")
def late_run(ddpdoctor: Ddpdoctor, place: Path) -> Path:
    """A recorded run of two real ranks, of which the second is so late that a busy machine does not hide it."""
    return _profiled(ddpdoctor, place, "late", "late:late_ms=200")


@pytest.fixture(scope="session")
def even_run(ddpdoctor: Ddpdoctor, place: Path) -> Path:
    """The same job without its straggler."""
    return _profiled(ddpdoctor, place, "even", "late:straggler=none")
