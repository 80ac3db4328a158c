"""Keeps parsed files, so that scripts which import the same modules share them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from ddpdoctor.source.module import Module
from ddpdoctor.source.script import Reader, parse, parse_bytes

SHARED = ("index", "lines", "words", "_words")
"""What is computed of a module and does not depend on its name."""
MAXIMUM_KEPT_BYTES = 4_000_000
"""Of source text; its trees take about 40 times as much. What goes beyond it is parsed again where it has to be."""


def shared_reader(held: Mapping[Path, bytes] | None = None) -> Reader:
    """A reader that parses each file once; ``held`` has the content of files that are not to be read from the disk."""
    held = held or {}
    kept: dict[Path, dict[tuple[str, str], Module]] = {}
    kept_bytes = 0
    latest_entry: Path | None = None

    def forget(path: Path) -> None:
        nonlocal kept_bytes
        kept_bytes -= len(next(iter(kept.pop(path).values())).text)

    def read(path: Path, name: str, package: str) -> Module:
        nonlocal kept_bytes, latest_entry
        known = kept.pop(path, {})
        module = known.get((name, package))
        if module is None and known:
            module = _renamed(next(iter(known.values())), name, package)
        elif module is None:
            module = parse_bytes(held[path], path, name, package) if path in held else parse(path, name, package)
            kept_bytes += len(module.text)
            if latest_entry in kept and _is_entry_alone(kept[latest_entry]):
                forget(latest_entry)
            latest_entry = path if name == "__main__" else None
        known[name, package] = module
        kept[path] = known  # The order of the dict is that of the last use.
        while kept_bytes > MAXIMUM_KEPT_BYTES and len(kept) > 1:
            forget(next(iter(kept)))
        return module

    return read


def _renamed(module: Module, name: str, package: str) -> Module:
    other = msgspec.structs.replace(module, name=name, package=package)
    other.__dict__.update({key: module.__dict__[key] for key in SHARED if key in module.__dict__})
    return other


def _is_entry_alone(names: Mapping[tuple[str, str], Module]) -> bool:
    """Whether nothing imported a file so far: most entry scripts are read once."""
    return all(name == "__main__" for name, _ in names)
