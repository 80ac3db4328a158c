from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ddpdoctor"
LINKS = ("checks", "tui")
IN_THE_RANKS = (
    "probe",
    "record/descriptors.py",
    "record/layout.py",
    "record/ring_writer.py",
    "record/writer.py",
)
"""What is loaded into the processes of the job."""
WRITERS = {"ddpdoctor/report/streams.py", "ddpdoctor/testing/rank.py"}
"""In a rank of a test stdout is the test's."""
MAXIMUM_LINES = 500


def python_files() -> list[Path]:
    """Our Python files, each once, tests and examples included."""
    rooms = ("ddpdoctor", "checks", "tui", "tests", "examples")
    return sorted(path for room in rooms for path in _walk(ROOT / room))


def _walk(directory: Path) -> Iterator[Path]:
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink() and path.name != "__pycache__":
            yield from _walk(path)
        elif path.suffix == ".py":
            yield path


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _in_the_ranks(path: Path) -> bool:
    return any(path.is_relative_to(PACKAGE / part) for part in IN_THE_RANKS)


every_file = pytest.mark.parametrize("path", python_files(), ids=_name)


def test_the_links_to_the_top_level_packages_are_there() -> None:
    for name in LINKS:
        link = PACKAGE / name
        assert link.is_symlink()
        assert link.resolve() == ROOT / name


def test_every_directory_with_code_is_a_package_that_the_wheel_holds() -> None:
    from setuptools import find_namespace_packages

    rooms = (PACKAGE, ROOT / "checks", ROOT / "tui")
    files = [path for path in python_files() if any(map(path.is_relative_to, rooms))]
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in files}
    packages = find_namespace_packages(str(ROOT), include=("ddpdoctor", "ddpdoctor.*"), exclude=("*.__pycache__",))
    assert sorted(name if name.startswith("ddpdoctor") else f"ddpdoctor.{name}" for name in found) == sorted(packages)


@every_file
def test_a_file_has_at_most_500_lines_and_a_name_that_says_something(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAXIMUM_LINES
    sample = path.is_relative_to(ROOT / "tests") and not path.name.startswith("test_")
    assert sample or path.stem not in {"utils", "helpers", "common", "util", "misc"}


@every_file
def test_only_the_streams_module_writes_to_stdout_and_stderr(path: Path) -> None:
    if _name(path).startswith(("tests/", "examples/")) or _name(path) in WRITERS or _in_the_ranks(path):
        return
    for node in ast.walk(ast.parse(path.read_text())):
        assert not (isinstance(node, ast.Name) and node.id == "print"), f"print in line {node.lineno}"
        if isinstance(node, ast.Attribute):
            assert ast.unparse(node) not in {"sys.stdout", "sys.stderr", "click.echo"}, f"line {node.lineno}"


@every_file
def test_what_is_loaded_into_the_ranks_imports_only_the_standard_library_torch_and_itself(path: Path) -> None:
    if not _in_the_ranks(path):
        return
    for node in ast.walk(ast.parse(path.read_text(), feature_version=(3, 9))):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [] if node.level else [node.module or ""]
        else:
            continue
        for module in modules:
            top = module.partition(".")[0]
            assert top in sys.stdlib_module_names or top == "torch", f"line {node.lineno} imports {module}"
