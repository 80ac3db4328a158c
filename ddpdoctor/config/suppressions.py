"""Comments that suppress findings.

``# ddpdoctor: ignore[DDP101, missing-set-epoch]`` on a line suppresses what these checks find there: on the first line
of the place that a report names, on its last line, or alone on the line above. ``# ddpdoctor: file-ignore[DDP601]``
alone on a line suppresses what they find in the file. The checks have to be named, by codes or names.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from ddpdoctor.finding import Finding, Location

_MARK = re.compile(r"#\s*ddpdoctor\s*:\s*(?P<kind>file-ignore|ignore)\b(?:\s*\[(?P<words>[^\]]*)\])?", re.IGNORECASE)


class Suppression(msgspec.Struct, frozen=True, kw_only=True):
    """One comment."""

    location: Location
    """Of the comment's text."""
    kind: Literal["ignore", "file-ignore"]
    words: tuple[str, ...]
    """As written; empty when it names no check."""
    lines: tuple[int, ...] = ()
    """The lines that it speaks of; empty for a whole file."""


class Used(msgspec.Struct, frozen=True):
    """A word of a comment that suppressed a finding."""

    location: Location
    word: str


class Suppressed(msgspec.Struct, frozen=True, kw_only=True):
    """Findings divided by the comments."""

    kept: tuple[Finding, ...]
    suppressed: tuple[Finding, ...] = ()
    used: frozenset[Used] = frozenset()


def suppressions_in(file: str, text: str) -> tuple[Suppression, ...]:
    """Read the comments of a file; a file without any costs one search."""
    if "ddpdoctor" not in text:
        return ()
    return tuple(_read(file, text))


def suppress(
    findings: Sequence[Finding], comments: Mapping[str, Sequence[Suppression]], codes: Mapping[str, str]
) -> Suppressed:
    """Take out the findings that a comment in their file (a key of ``comments``) suppresses.

    ``codes`` has the code of a check by its code in upper case and by its name in lower case.
    """
    kept: list[Finding] = []
    taken: list[Finding] = []
    used: set[Used] = set()
    for finding in findings:
        place = finding.location
        speaking = [] if place is None else list(_speaking(finding, place, comments.get(place.file, ()), codes))
        (taken if speaking else kept).append(finding)
        used.update(speaking)
    return Suppressed(kept=tuple(kept), suppressed=tuple(taken), used=frozenset(used))


def code_of(word: str, codes: Mapping[str, str]) -> str:
    """The code that a word of a comment means; empty when there is no such check."""
    return codes.get(word.upper()) or codes.get(word.lower(), "")


def _speaking(
    finding: Finding, place: Location, comments: Iterable[Suppression], codes: Mapping[str, str]
) -> Iterator[Used]:
    ends = {place.line, max(place.line, place.end_line)}
    for comment in comments:
        if comment.kind == "ignore" and not ends.intersection(comment.lines):
            continue
        for word in comment.words:
            if code_of(word, codes) == finding.code:
                yield Used(comment.location, word)


def _read(file: str, text: str) -> Iterator[Suppression]:
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for line, column, comment in _comments(text, lines):
        for match in _MARK.finditer(comment):
            alone = not lines[line - 1][: column - 1].strip()
            start = column + match.start()
            kind: Literal["ignore", "file-ignore"] = "file-ignore" if "file" in match["kind"].lower() else "ignore"
            yield Suppression(
                location=Location(
                    file=file, line=line, column=start, end_line=line, end_column=start + len(match.group().rstrip())
                ),
                kind=kind,
                words=tuple(word.strip() for word in (match["words"] or "").split(",") if word.strip()),
                lines=() if kind == "file-ignore" else ((line, _next_code(lines, line)) if alone else (line,)),
            )


def _comments(text: str, lines: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """Line, 1-based column and text of the comments; those before a place that is no Python for this interpreter."""
    try:
        for token in tokenize.generate_tokens(io.StringIO("\n".join(lines)).readline):
            if token.type == tokenize.COMMENT and "ddpdoctor" in token.string.lower():
                yield token.start[0], token.start[1] + 1, token.string
    except (tokenize.TokenError, SyntaxError):
        return


def _next_code(lines: Sequence[str], line: int) -> int:
    """The first line below a comment that is no comment itself."""
    below = line + 1
    while below <= len(lines) and lines[below - 1].lstrip().startswith("#"):
        below += 1
    return below
