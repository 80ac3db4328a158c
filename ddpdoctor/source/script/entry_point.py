"""Scripts that start or are a distributed job, as against modules and everything else."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ddpdoctor.source.script.module import Module, descend, last_name, once
from ddpdoctor.source.script.script import Script, imports_any, parse_bytes, uses_part

FRAMEWORKS = (b"torch", b"accelerate", b"lightning", b"transformers", b"deepspeed", b"horovod")
# What joins the ranks of a job or wraps a model for them; `DataParallel` is in the name of DDP too.
_JOINS = ("init_process_group", "init_device_mesh", "DataParallel", "Accelerator", "init_distributed", "horovod")


def may_be_entry(raw: bytes) -> bool:
    """Return whether the bytes of a file make it worth parsing: they mention torch or something built on it."""
    return any(word in raw for word in FRAMEWORKS)


def is_entry(script: Script) -> bool:
    """Return whether a script, when it is run, may start or join a distributed job.

    It does something when it is run (below a test of ``__name__``, or calls at its top level), and it or a module that
    it imports makes a process group or wraps a model.
    """
    return acts(script.entry) and (uses_part(script, _JOINS) or imports_any(script, ("deepspeed",)))


@once
def acts(module: Module) -> bool:
    """Return whether a file does something when it is run: below a test of ``__name__``, or by calls at top level."""
    body = module.tree.body
    called = not _is_only_imported(module) and any(map(_statement_acts, body))
    tests = (node for statement in body if isinstance(statement, ast.If) for node in descend(statement.test))
    return called or any(isinstance(node, ast.Name) and node.id == "__name__" for node in tests)


def _is_only_imported(module: Module) -> bool:
    """Return whether a file with no test of how it is run is part of a package: run by itself, it could not import."""
    relative = any(isinstance(statement, ast.ImportFrom) and statement.level for statement in module.tree.body)
    return relative or module.path.name == "__init__.py"


def _statement_acts(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.If):
        return any(map(_statement_acts, statement.body)) or any(map(_statement_acts, statement.orelse))
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call) and not _sets_up_a_module(statement.value)
    return isinstance(statement, (ast.For, ast.While, ast.With))


# Last names of calls that modules make at their top level when they are imported.
_SETTING_UP = frozenset(
    {"filterwarnings", "simplefilter", "basicConfig", "append", "insert", "setdefault", "update", "register", "extend"}
)


def _sets_up_a_module(call: ast.Call) -> bool:
    name = last_name(call.func)
    return name in _SETTING_UP or name.startswith(("set_", "use_", "register"))


# Keeps parsed files, so that scripts which import the same modules share them.

SHARED = ("index", "lines", "words", "calls_by_name", "_words")
"""What is computed of a module and does not depend on its name."""
MAXIMUM_KEPT_BYTES = 4_000_000
"""Of source text; its trees take about 40 times as much. What goes beyond it is parsed again where it has to be."""


class Library:
    """A reader that reads each file once; ``held`` has the content of files that are not to be read from the disk."""

    def __init__(self, held: Mapping[Path, bytes] | None = None) -> None:
        self._held = held or {}
        self._kept: dict[Path, dict[tuple[str, str], Module]] = {}
        """By file, in the order of the last use, the module under the name and package that scripts give it."""
        self._kept_bytes = 0
        self._latest: tuple[Path, bytes] | None = None

    def content(self, path: Path) -> bytes:
        """Return what a file holds; looking into it and then parsing it reads it once. Raises OSError."""
        held = self._held.get(path)
        if held is not None:
            return held
        if self._latest is None or self._latest[0] != path:
            self._latest = path, path.read_bytes()
        return self._latest[1]

    def read(self, path: Path, name: str, package: str) -> Module:
        """Read a module as ``parse`` does, or take it from those that are kept."""
        known = self._kept.pop(path, {})
        module = known.get((name, package))
        if module is None and known:
            module = _renamed(next(iter(known.values())), name, package)
        elif module is None:
            module = parse_bytes(self.content(path), path, name, package)
            self._kept_bytes += len(module.text)
        known[name, package] = module
        self._kept[path] = known
        while self._kept_bytes > MAXIMUM_KEPT_BYTES and len(self._kept) > 1:
            self._forget(next(iter(self._kept)))
        return module

    def release(self, path: Path) -> None:
        """Let go of an entry script that was examined, unless something imports it: most are read once."""
        names = self._kept.get(path, {})
        if names and all(name == "__main__" for name, _ in names):
            self._forget(path)

    def _forget(self, path: Path) -> None:
        self._kept_bytes -= len(next(iter(self._kept.pop(path).values())).text)


def _renamed(module: Module, name: str, package: str) -> Module:
    other = msgspec.structs.replace(module, name=name, package=package)
    other.__dict__.update({key: module.__dict__[key] for key in SHARED if key in module.__dict__})
    return other
