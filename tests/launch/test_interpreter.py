"""Which Python runs the ranks."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from ddpdoctor.errors import UsageError
from ddpdoctor.launch.interpreter import TorchMissing, find_interpreter
from ddpdoctor.launch.request import Launch


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
    with pytest.raises(UsageError, match=r"--python .*bin/python: has no torch"):
        find_interpreter(without_torch)


def test_a_named_program_that_is_no_python_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such program"):
        find_interpreter(str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="does not run Python code"):
        find_interpreter("/bin/true")


def test_the_directory_of_an_environment_may_be_named(tmp_path: Path) -> None:
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    with pytest.raises(UsageError, match="a directory without bin/python"):
        find_interpreter(str(tmp_path / "venv"))
    _python_with_torch(tmp_path / "venv" / "bin" / "python")
    assert find_interpreter(str(tmp_path / "venv")).path == str(tmp_path / "venv" / "bin" / "python")


def test_the_launch_commands_python_comes_before_ours_when_it_has_torch(tmp_path: Path, without_torch: str) -> None:
    other = str(_python_with_torch(tmp_path / "python"))
    assert find_interpreter(None, Launch(program=other)).path == other
    assert find_interpreter(None, Launch(program=without_torch)).path == sys.executable
    assert find_interpreter(sys.executable, Launch(program=other, must_use_program=True)).path == sys.executable
    with pytest.raises(UsageError, match="has no torch"):
        find_interpreter(None, Launch(program=without_torch, must_use_program=True))


def test_the_projects_own_environment_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, without_torch: str
) -> None:
    monkeypatch.setattr("ddpdoctor.launch.interpreter.importlib.util.find_spec", lambda name: None)
    for name in ("CONDA_PREFIX", "VIRTUAL_ENV"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(Path(without_torch).parent))
    (tmp_path / "project" / "scripts").mkdir(parents=True)
    (tmp_path / "project" / "pyproject.toml").touch()
    _python_with_torch(tmp_path / ".venv" / "bin" / "python")
    monkeypatch.chdir(tmp_path / "project" / "scripts")
    with pytest.raises(TorchMissing):
        find_interpreter(None)
    mine = _python_with_torch(tmp_path / "project" / ".venv" / "bin" / "python")
    assert find_interpreter(None).path == str(mine)


def _python_with_torch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return path


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
