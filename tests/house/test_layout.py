from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ddpdoctor"
LINKS = ("checks", "tui")
IN_THE_RANKS = (
    "probe",
    "record/writer.py",
    "record/layout.py",
)
"""What is loaded into the processes of the job."""
WRITERS = {"ddpdoctor/report/streams.py", "ddpdoctor/testing/rank.py", "ddpdoctor/__main__.py"}
"""In a rank of a test stdout is the test's; the version is printed before anything is imported."""
LONG = ROOT / "tests" / "long.txt"
MAXIMUM_LINES = 700
MAXIMUM_LINES_OF_TESTS = 500
MAXIMUM_FILES = 16
GONE = re.compile(r"\b(told|tells|nobody|somebody|heard|spoken)\b", re.IGNORECASE)
"""Computed, reported, queried: what the reader of sources and the probe do has the field's words."""
NO_VERBS = frozenset({"The", "A", "An", "What", "Whether", "How", "Where", "Those", "Tell"})


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


def test_a_file_has_at_most_700_lines_and_a_name_that_says_something() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in python_files()}
    most = {path: MAXIMUM_LINES_OF_TESTS if path.is_relative_to(ROOT / "tests") else MAXIMUM_LINES for path in lengths}
    assert [_name(path) for path, lines in lengths.items() if lines > most[path]] == []
    nameless = {"utils", "helpers", "common", "util", "misc"}
    files = [path for path in python_files() if not path.is_relative_to(ROOT / "tests") or path.name[:5] == "test_"]
    assert [_name(path) for path in files if path.stem in nameless] == []


def test_no_folder_of_the_core_holds_more_than_16_files() -> None:
    files = [path for path in python_files() if path.is_relative_to(PACKAGE) and path.name != "__init__.py"]
    counts = Counter(_name(path.parent) for path in files)
    assert {name: count for name, count in counts.items() if count > MAXIMUM_FILES} == {}


def test_only_the_streams_module_writes_to_stdout_and_stderr() -> None:
    assert [place for path in python_files() if _is_silent(path) for place in _writes(path)] == []


def test_what_is_loaded_into_the_ranks_imports_only_the_standard_library_torch_and_itself() -> None:
    assert [place for path in python_files() if _in_the_ranks(path) for place in _foreign_imports(path)] == []


def test_of_ours_the_ranks_import_what_these_rules_hold_for_and_nothing_else() -> None:
    for path in filter(_in_the_ranks, python_files()):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                folder = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                named = [folder / alias.name for alias in node.names] if folder.is_dir() else [folder]
                files = [place.with_suffix(".py") for place in named if place.with_suffix(".py").is_file()]
                assert [_name(file) for file in files if not _in_the_ranks(file)] == [], f"{_name(path)}:{node.lineno}"


def test_the_rules_for_the_ranks_name_the_same_files_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    older = {name.removeprefix("ddpdoctor/") for name in project["ruff"]["per-file-target-version"]}
    assert {name.removesuffix("/**") for name in older} - {"probe/rehearsal"} == set(IN_THE_RANKS)
    contracts = [set(contract.get("source_modules", ())) for contract in project["importlinter"]["contracts"]]
    parts = {f"ddpdoctor.{name.removesuffix('.py').replace('/', '.')}" for name in IN_THE_RANKS}
    assert parts in contracts


def test_docstrings_of_the_reader_and_the_probe_are_imperative_and_in_the_fields_words() -> None:
    rooms = (PACKAGE / "source", PACKAGE / "probe")
    files = [path for path in python_files() if any(map(path.is_relative_to, rooms))]
    assert [place for path in files for place in _odd_docstrings(path)] == []


def _is_silent(path: Path) -> bool:
    """Whether a file of ours may print nothing."""
    name = _name(path)
    return not name.startswith(("tests/", "examples/")) and name not in WRITERS and not _in_the_ranks(path)


def _writes(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name) and node.id == "print":
            yield f"{_name(path)}:{node.lineno}: print"
        if isinstance(node, ast.Attribute) and ast.unparse(node) in {"sys.stdout", "sys.stderr", "click.echo"}:
            yield f"{_name(path)}:{node.lineno}: {ast.unparse(node)}"


def _foreign_imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(), feature_version=(3, 9))):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [] if node.level else [node.module or ""]
        else:
            continue
        for module in modules:
            top = module.partition(".")[0]
            if top not in sys.stdlib_module_names and top != "torch":
                yield f"{_name(path)}:{node.lineno}: {module}"


def _odd_docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from (f"{_name(path)}:{node.lineno}: {word}" for word in GONE.findall(node.value.value))
        if isinstance(node, ast.FunctionDef) and not any("property" in ast.unparse(one) for one in node.decorator_list):
            first, *_ = (ast.get_docstring(node) or "Return").split()
            if first in NO_VERBS:
                yield f"{_name(path)}:{node.lineno}: {first}"


def test_each_test_that_is_listed_as_long_is_there_and_the_list_is_sorted() -> None:
    listed = LONG.read_text(encoding="utf-8").splitlines()
    assert listed == sorted(set(listed))
    for path, _, name in (line.partition(" ")[0].partition("::") for line in listed):
        assert re.search(rf"^def {name}\(", (LONG.parent / path).read_text(encoding="utf-8"), re.M), f"{path} {name}"
