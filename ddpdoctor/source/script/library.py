"""Keeps parsed files, so that scripts which import the same modules share them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from ddpdoctor.source.script.module import Module
from ddpdoctor.source.script.script import parse_bytes

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
