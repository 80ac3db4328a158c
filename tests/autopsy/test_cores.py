"""A core file of a rank is read by pystack; where it cannot be, one sentence says why."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ddpdoctor.autopsy.dead_job import AutopsyRequest, autopsy

SCRIPT = """import os, signal
def train():
    os.kill(os.getpid(), signal.SIGSEGV)
train()
"""


def _with_cores() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def core_of(*command: str, directory: Path) -> Path:
    subprocess.run(command, cwd=directory, preexec_fn=_with_cores, check=False, timeout=60)
    written = sorted(directory.glob("core*"))
    if not written:
        pytest.skip("this machine writes no core files into the working directory")
    return written[0].rename(directory / "core.4711")


def test_a_core_file_shows_the_signal_and_the_line(tmp_path: Path) -> None:
    if shutil.which("pystack") is None and not Path(sys.executable).with_name("pystack").exists():
        pytest.skip("pystack is not installed")
    (tmp_path / "train.py").write_text(SCRIPT)
    core = core_of(sys.executable, str(tmp_path / "train.py"), directory=tmp_path)
    first = autopsy(AutopsyRequest(paths=(str(core),))).findings[0]
    assert (first.code, first.role) == ("DDP703", "cause") and "SIGSEGV" in first.title
    assert first.locations[0].line == 3


def test_a_core_file_that_cannot_be_read_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = tmp_path / "core.1"
    core.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x04\x00" + bytes(200))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    examination = autopsy(AutopsyRequest(paths=(str(core),)))
    assert not examination.findings and any("pystack" in note for note in examination.notes)
