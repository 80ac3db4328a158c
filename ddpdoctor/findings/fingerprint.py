"""Fingerprints of findings: the same defect keeps its fingerprint when lines move."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

import msgspec

from ddpdoctor.files.source_text import line_of
from ddpdoctor.finding import Finding
from ddpdoctor.findings.locations import shown_path

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
