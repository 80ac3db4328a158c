"""Compares places in source files, and names places and ranks the way a user would."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import msgspec

from ddpdoctor.files.source_text import line_of
from ddpdoctor.finding import Finding, Frame, Location

# Fingerprints of findings: the same defect keeps its fingerprint when lines move.

_LONGEST_LINE = 10_000
"""Characters of a line that count; one of a megabyte that has thousands of findings took minutes."""


def with_fingerprints(findings: Sequence[Finding], root: str) -> tuple[Finding, ...]:
    """Fill in the fingerprint of every finding, in the order given.

    It is made of the code, the path relative to ``root``, the enclosing function, the line without its white space, and
    the ordinal among the findings that agree in all of these, counted from the top of the file.
    """
    ordered = sorted(enumerate(findings), key=lambda numbered: _position(numbered[1]))
    seen: Counter[str] = Counter()
    fingerprints: dict[int, str] = {}
    for index, finding in ordered:
        identity = _identity(finding, root)
        fingerprints[index] = _digest(f"{identity}\0{seen[identity]}")
        seen[identity] += 1
    return tuple(
        msgspec.structs.replace(finding, fingerprint=fingerprints[index]) for index, finding in enumerate(findings)
    )


def _position(finding: Finding) -> tuple[str, int, int]:
    location = finding.location
    return (location.file, location.line, location.column) if location else ("", 0, 0)


def _identity(finding: Finding, root: str) -> str:
    location = finding.location
    if location is None:
        return f"{finding.code}\0\0\0"
    path = shown_path(location.file, root)
    if os.path.isabs(path):
        path = os.path.basename(path)
    # A run knows a method as "step", the source as "Trainer.step".
    function = location.function.rpartition(".")[2].replace("<module>", "")
    line = "".join(line_of(location.file, location.line)[:_LONGEST_LINE].split())
    return f"{finding.code}\0{path}\0{function}\0{line}"


def _digest(text: str) -> str:
    from hashlib import sha256

    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def meets(one: Location, other: Location) -> bool:
    """Return whether the lines of two locations overlap in the same file."""
    if same_lines(one, other):
        return True
    return same_lines(other, one)


def same_lines(outer: Location, inner: Location) -> bool:
    """Return whether ``inner`` starts inside the lines of ``outer``; symbolic links to one file are the same file."""
    return outer.line <= inner.line <= max(outer.line, outer.end_line) and same_file(outer.file, inner.file)


def same_file(one: str, other: str) -> bool:
    """Return whether two absolute paths name the same file: Python resolves links for some modules and not for
    others.
    """
    return one == other or _real(one) == _real(other)


def of_frame(frame: Frame) -> Location:
    """Return the place of a frame."""
    return Location(file=frame.file, line=frame.line, function="" if frame.function == "<module>" else frame.function)


def shown_path(file: str, root: str) -> str:
    """Write a path relative to ``root`` with forward slashes; a file outside of ``root`` keeps its absolute path."""
    for path, base in ((file, root), (_real(file), _real(root))):
        if path.startswith(base.rstrip(os.sep) + os.sep):
            return path[len(base.rstrip(os.sep)) + 1 :].replace(os.sep, "/")
    return file.replace(os.sep, "/")


def plain(text: str) -> str:
    """Return a text without halves of characters, which come from file names and which JSON cannot hold."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def named_ranks(ranks: Sequence[int]) -> str:
    """Write ``rank 1`` or ``ranks 0, 1 and 2``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def in_user_code(file: str) -> bool:
    """Return whether a file is neither the standard library's, nor an installed package's, nor ours."""
    parts = file.replace("\\", "/").split("/")
    if "site-packages" in parts or "dist-packages" in parts or file.startswith("<"):
        return False
    ours = any(before == "ddpdoctor" and part in _IN_THE_RANKS for before, part in pairwise(parts))
    return not ours and not is_of_python(file)


def is_of_python(file: str) -> bool:
    """Return whether a file is the standard library's."""
    parts = file.replace("\\", "/").split("/")
    within = any(before == "lib" and part.startswith("python3") for before, part in pairwise(parts))
    return within and "site-packages" not in parts and "dist-packages" not in parts


_IN_THE_RANKS = ("probe", "rehearsal")
"""Our own packages in the user's processes: a clone of ours is no installed package."""


@lru_cache(maxsize=4096)
def _real(path: str) -> str:
    try:
        return os.path.realpath(path)
    except ValueError:
        # A name from elsewhere that no file can have.
        return path
