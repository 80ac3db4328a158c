"""Which Python runs the ranks."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from ddpdoctor.errors import UsageError
from ddpdoctor.launch.interpreter import TorchMissing, find_interpreter


@pytest.fixture
def without_torch(tmp_path: Path) -> str:
    """A Python that has no torch."""
    path = tmp_path / "bin" / "python"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\nexec {sys._base_executable} -I -S "$@"\n')  # type: ignore[attr-defined]
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_our_own_python_is_used_when_it_has_torch() -> None:
    found = find_interpreter(None)
    assert found.path == sys.executable and found.torch_version.startswith("2.")


def test_a_named_python_is_asked_for_torch(without_torch: str) -> None:
    assert find_interpreter(sys.executable).torch_version.startswith("2.")
    with pytest.raises(TorchMissing, match="has no torch"):
        find_interpreter(without_torch)


def test_a_named_program_that_is_no_python_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such program"):
        find_interpreter(str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="does not run Python code"):
        find_interpreter("/bin/true")


def test_the_active_environment_serves_when_ours_has_no_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, without_torch: str
) -> None:
    monkeypatch.setattr("ddpdoctor.launch.interpreter.importlib.util.find_spec", lambda name: None)
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    environment = tmp_path / "venv" / "bin"
    environment.mkdir(parents=True)
    (environment / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (environment / "python").chmod(0o755)
    monkeypatch.setenv("VIRTUAL_ENV", str(environment.parent))
    assert find_interpreter(None).path == str(environment / "python")

    monkeypatch.delenv("VIRTUAL_ENV")
    monkeypatch.setenv("PATH", str(Path(without_torch).parent))
    with pytest.raises(TorchMissing, match="torch is not installed"):
        find_interpreter(None)
