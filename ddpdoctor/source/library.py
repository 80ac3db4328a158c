"""Keeps parsed files, so that scripts which import the same modules share them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from ddpdoctor.source.module import Module
from ddpdoctor.source.script import Reader, parse, parse_bytes

SHARED = ("index", "lines", "words")
"""What is computed of a module and does not depend on its name."""
MAXIMUM_KEPT_BYTES = 4_000_000
"""Of source text; its trees take about 40 times as much. What goes beyond it is parsed again where it has to be."""


def shared_reader(held: Mapping[Path, bytes] | None = None) -> Reader:
    """A reader that parses each file once; ``held`` has the content of files that are not to be read from the disk."""
    held = held or {}
    kept: dict[tuple[Path, str, str], Module] = {}
    by_path: dict[Path, Module] = {}
    kept_bytes = 0

    def read(path: Path, name: str, package: str) -> Module:
        nonlocal kept_bytes
        key = (path, name, package)
        if key in kept:
            return kept[key]
        known = by_path.get(path)
        if known is not None:
            module = msgspec.structs.replace(known, name=name, package=package)
            module.__dict__.update({key: known.__dict__[key] for key in SHARED if key in known.__dict__})
        else:
            module = parse_bytes(held[path], path, name, package) if path in held else parse(path, name, package)
        if kept_bytes > MAXIMUM_KEPT_BYTES:
            kept.clear()
            by_path.clear()
            kept_bytes = 0
        if known is None:
            kept_bytes += len(module.text)
        kept[key] = module
        by_path[path] = module
        return module

    return read
