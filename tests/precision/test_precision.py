"""Reads training code of other people's packages: no finding that nobody has read, and no crash.

Packages are downloaded into a directory beside the temporary files, where later runs find them. The test is skipped
when the package registry cannot be reached.
"""

from __future__ import annotations

import getpass
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.catalogue.registry import read_catalogue
from ddpdoctor.catalogue.run_checks import run_checks
from ddpdoctor.source.script.entry_point import Library
from ddpdoctor.source.script.script import script_at

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TARGETS: Mapping[str, Any] = tomllib.loads((Path(__file__).parent / "targets.toml").read_text(encoding="utf-8"))
PACKAGES: Sequence[Mapping[str, Any]] = TARGETS["package"]
CACHE = Path(tempfile.gettempdir()) / f"ddpdoctor-precision-{getpass.getuser()}"
UNREACHABLE = ("NewConnectionError", "Temporary failure in name resolution", "ConnectTimeout", "ProxyError")

Place = tuple[str, int, str]


def unpacked(package: Mapping[str, Any]) -> Path:
    """The directory that holds a package's files; downloads it the first time."""
    name = f"{package['name']}-{package['version']}"
    directory = CACHE / name
    if not (directory / "complete").exists():
        directory.mkdir(parents=True, exist_ok=True)
        archive = download(package, directory / "archive")
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(directory, [entry for entry in wheel.namelist() if entry.endswith(".py")])
        else:
            with tarfile.open(archive) as source:
                entries = [entry for entry in source.getmembers() if entry.isfile() and entry.name.endswith(".py")]
                source.extractall(directory, entries, filter="data")
        (directory / "complete").touch()
    return directory / str(package.get("root", ""))


def download(package: Mapping[str, Any], directory: Path) -> Path:
    wanted = f"{package['name']}=={package['version']}"
    command = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), wanted)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and any(sign in done.stderr for sign in UNREACHABLE):
        pytest.skip("the package registry cannot be reached")
    assert done.returncode == 0, done.stderr
    return next(path for path in directory.iterdir() if path.suffix in {".whl", ".gz"})


def test_the_list_is_long_enough() -> None:
    assert sum(len(package["files"]) for package in PACKAGES) >= 60


@pytest.mark.parametrize("package", PACKAGES, ids=[package["name"] for package in PACKAGES])
def test_every_finding_was_read(package: Mapping[str, Any]) -> None:
    directory = unpacked(package)
    entries = [entry for entry in read_catalogue().entries if entry.in_source]
    reader = Library().read
    found: set[Place] = set()
    crashed: list[tuple[str, str, str]] = []
    for file in package["files"]:
        for result in run_checks(entries, script_at(directory / file, reader), None, static=True):
            crashed.extend([(file, result.code, result.gap)] if result.crashed else [])
            for finding in result.from_source:
                location = finding.location
                if location is not None:
                    found.add((str(Path(location.file).relative_to(directory)), location.line, finding.code))
    known = {
        (entry["file"], entry["line"], entry["code"])
        for entry in TARGETS["finding"]
        if entry["package"] == package["name"]
    }
    assert not crashed
    assert found == known


def test_the_precision_is_what_the_table_says() -> None:
    from tests.precision.table import table

    written = (Path(__file__).parent / "PRECISION.md").read_text(encoding="utf-8")
    assert table(TARGETS["finding"]) in written
