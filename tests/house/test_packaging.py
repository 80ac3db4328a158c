"""Wheel, source distribution and editable install, built from a copy of the tree and tried outside of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from ddpdoctor import __version__
from tests.index_of_checks import BUILT_IN

ROOT = Path(__file__).parents[2]
WHEEL = f"ddpdoctor-{__version__}-py3-none-any.whl"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a release is made of, its links kept."""
    tree = tmp_path_factory.mktemp("tree")
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("ddpdoctor", "checks", "tui"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    (tree / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "ddpdoctor.1", tree / "docs")
    return tree


@pytest.fixture(scope="module")
def distributions(tree: Path) -> Path:
    """The directory of the source distribution and the wheel that was built from it."""
    _run("-m", "build", "--no-isolation", "--outdir", str(tree / "dist"), str(tree), cwd=tree)
    return tree / "dist"


def test_the_wheel_made_of_the_source_distribution_holds_every_file_of_the_package(distributions: Path) -> None:
    with zipfile.ZipFile(distributions / WHEEL) as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {
        Path(directory, name).relative_to(ROOT).as_posix()
        for directory, _, names in os.walk(ROOT / "ddpdoctor", followlinks=True)
        for name in names
        if name.endswith((".py", ".tcss", ".jinja", ".css", ".xz", ".toml", ".json"))
    }
    manual = f"{WHEEL.split('-py3')[0]}.data/data/share/man/man1/ddpdoctor.1"
    assert packed == expected | {"ddpdoctor/py.typed", manual}


def test_an_installed_wheel_works_away_from_the_tree(distributions: Path, tmp_path: Path) -> None:
    python = _environment(tmp_path)
    _install(python, str(distributions / WHEEL))
    _try(python, tmp_path)


def test_an_editable_install_works_away_from_the_tree(tree: Path, tmp_path: Path) -> None:
    python = _environment(tmp_path)
    _install(python, "--no-build-isolation", "-e", str(tree))
    _try(python, tmp_path)


def _environment(directory: Path) -> Path:
    """A virtual environment that sees the packages of the one that runs the tests, but not ddpdoctor."""
    _run("-m", "venv", "--without-pip", str(directory / "venv"), cwd=directory)
    python = directory / "venv" / "bin" / "python"
    site = _run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=directory, python=python).strip()
    ours = Path(sysconfig.get_path("purelib"))
    for entry in ours.iterdir():
        if not entry.name.startswith(("ddpdoctor", "__editable__", "__pycache__", "pip")):
            (Path(site) / entry.name).symlink_to(entry)
    return python


def _install(python: Path, *what: str) -> None:
    _run("-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", *what, cwd=python.parent)


def _try(python: Path, directory: Path) -> None:
    joins = "import torch.distributed as dist\ndist.init_process_group()\ndist.destroy_process_group()\n"
    (directory / "train.py").write_text(joins)
    assert _run("-m", "ddpdoctor", "--version", cwd=directory, python=python) == f"ddpdoctor {__version__}\n"
    script = subprocess.run(
        (python.parent / "ddpdoctor", "check", "--static", "train.py"), cwd=directory, capture_output=True, text=True
    )
    assert script.returncode == 0, script.stderr
    listed = _run("-m", "ddpdoctor", "explain", cwd=directory, python=python)
    assert [line.split()[0] for line in listed.splitlines()] == list(BUILT_IN)
    ask = "import ddpdoctor.checks, ddpdoctor.tui; print(ddpdoctor.__file__)"
    where = _run("-c", ask, cwd=directory, python=python)
    assert not where.startswith(str(ROOT))


def _run(*arguments: str, cwd: Path, python: Path = Path(sys.executable)) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run((str(python), *arguments), cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
