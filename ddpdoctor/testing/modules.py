"""Imports the user's test modules into a rank, under the names and with the rewritten assertions that pytest gives."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType


def imported(files: Iterable[tuple[str, str]], *, rewrite: bool) -> ModuleType:
    """Import modules, each given by name and path, in their order; the last one. Raises whatever they raise."""
    module = None
    for name, path in files:
        module = sys.modules.get(name)
        if module is None or getattr(module, "__file__", None) != path:
            module = _import(name, path, rewrite=rewrite)
    assert module is not None
    return module


def _import(name: str, path: str, *, rewrite: bool) -> ModuleType:
    parent = _parent(name.rpartition(".")[0], Path(path).parent)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    source = Path(path).read_bytes()
    tree = ast.parse(source, filename=path)
    if rewrite:
        _rewrite(tree, source, path)
    sys.modules[name] = module
    try:
        exec(compile(tree, path, "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    if parent is not None:
        setattr(parent, name.rpartition(".")[2], module)
    return module


def _parent(name: str, directory: Path) -> ModuleType | None:
    """Return the package above; where it is none that can be imported, an empty one, as pytest's importlib mode makes
    it.
    """
    if not name:
        return None
    try:
        return importlib.import_module(name)
    except ImportError:
        _parent(name.rpartition(".")[0], directory.parent)
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(directory)]
        return package


def _rewrite(tree: ast.Module, source: bytes, path: str) -> None:
    """Have failing assertions show their values; without it they only say where they are."""
    try:
        from _pytest.assertion.rewrite import rewrite_asserts
    except ImportError:
        return
    rewrite_asserts(tree, source, path)
