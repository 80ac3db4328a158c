"""What is said of a run that belongs to somebody else: a real other user asks, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpdoctor.record import layout

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
AS_NOBODY = """
import os, sys
from ddpdoctor.cli.main import main
# What the commands import may lie where the other user cannot read.
main(sys.argv[1:])
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
os.environ["HOME"] = "/nonexistent"
print("== another user", file=sys.stderr, flush=True)
code = main(sys.argv[1:])
sys.stderr.flush()
os._exit(code)
"""


@pytest.fixture
def run() -> Iterator[Path]:
    """A run directory of root's, mode 0700, below one that everybody can enter."""
    with tempfile.TemporaryDirectory(prefix="ddpdoctor-runs-") as name:
        os.chmod(name, 0o755)
        directory = Path(name) / "run"
        directory.mkdir(mode=0o700)
        (directory / layout.JOB_FILE).write_text('{"version": 1, "kind": "run"}')
        yield directory


def _as_nobody(*words: str) -> tuple[int, str]:
    """Exit code and stderr of a command that another user gives."""
    done = subprocess.run((sys.executable, "-c", AS_NOBODY, *words), cwd="/", capture_output=True, text=True)
    return done.returncode, done.stderr.partition("== another user\n")[2]


@pytest.mark.parametrize("words", [("profile", "--run-dir"), ("report",)])
def test_a_run_that_may_not_be_read_is_said_to_belong_to_its_owner(words: tuple[str, ...], run: Path) -> None:
    refused = [
        f"error: {run} belongs to root and cannot be read",
        "hint:  Run ddpdoctor as that user, or ask for a copy of the directory.",
    ]
    code, said = _as_nobody(*words, str(run))
    assert (code, said.splitlines()) == (2, refused)
    run.chmod(0o755)
    (run / layout.JOB_FILE).chmod(0o644)
    events = run / layout.EVENTS_FILE.format(os.getpid())
    events.touch(mode=0o600)
    code, said = _as_nobody(*words, str(run))
    assert (code, said.splitlines()) == (2, refused)


def test_a_run_that_everybody_may_read_is_shown_to_another_user_and_not_written_to(run: Path) -> None:
    run.chmod(0o755)
    (run / layout.JOB_FILE).chmod(0o644)
    before = {path.name: path.stat().st_mtime_ns for path in run.iterdir()}
    code, said = _as_nobody("report", str(run))
    assert (code, said) == (0, "")
    assert {path.name: path.stat().st_mtime_ns for path in run.iterdir()} == before
