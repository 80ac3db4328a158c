"""No file imports another in a circle, not even for its types."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINKED = ("checks", "tui")


def test_no_file_imports_another_in_a_circle() -> None:
    files = {_module(path): path for room in ("ddpdoctor", *LINKED) for path in _walk(ROOT / room)}
    # The package itself imports nothing: it offers its public names lazily.
    graph = {name: set(_imports(path, name, files)) - {"ddpdoctor", name} for name, path in files.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(reversed(error.args[1]))) from error


def _walk(directory: Path) -> Iterator[Path]:
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)
        elif path.suffix == ".py":
            yield path


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    dotted = ".".join(("ddpdoctor", *parts) if parts[0] in LINKED else parts)
    return dotted.removesuffix(".__init__")


def _imports(path: Path, name: str, files: dict[str, Path]) -> Iterator[str]:
    """Modules of ours that a file imports, at its top, in a function, or for its types."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom):
            outer = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
            base = ".".join(filter(None, (outer, node.module))) if node.level else node.module or ""
            for alias in node.names:
                full = f"{base}.{alias.name}"
                if full in files or base in files:
                    yield full if full in files else base
