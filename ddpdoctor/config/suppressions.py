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

# A comment that suppresses findings suppresses nothing.


_MARK = re.compile(r"#\s*ddpdoctor\s*:\s*(?P<kind>file-ignore|ignore)\b(?:\s*\[(?P<words>[^\][#]*)\])?", re.IGNORECASE)


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
    said: dict[str, _SaidOfFile] = {}
    for finding in findings:
        place = finding.location
        speaking: list[Used] = []
        if place is not None and place.file in comments:
            if place.file not in said:
                said[place.file] = _said_of(comments[place.file], codes)
            speaking = list(_speaking(finding, place, said[place.file]))
        (taken if speaking else kept).append(finding)
        used.update(speaking)
    return Suppressed(kept=tuple(kept), suppressed=tuple(taken), used=frozenset(used))


def code_of(word: str, codes: Mapping[str, str]) -> str:
    """Return the code that a word of a comment means; empty when there is no such check."""
    return codes.get(word.upper()) or codes.get(word.lower(), "")


_SaidOfFile = dict[tuple[str, int], list[Used]]
"""The words by the code that they mean and the line that they speak of; line 0 is the whole file."""


def _said_of(comments: Iterable[Suppression], codes: Mapping[str, str]) -> _SaidOfFile:
    said: _SaidOfFile = {}
    for comment in comments:
        for word in comment.words:
            for line in comment.lines or (0,):
                said.setdefault((code_of(word, codes), line), []).append(Used(comment.location, word))
    return said


def _speaking(finding: Finding, place: Location, said: _SaidOfFile) -> Iterator[Used]:
    for line in {0, place.line, max(place.line, place.end_line)}:
        yield from said.get((finding.code, line), ())


def _read(file: str, text: str) -> Iterator[Suppression]:
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    code_below = _code_below(lines)
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
                lines=() if kind == "file-ignore" else ((line, code_below[line]) if alone else (line,)),
            )


def _comments(text: str, lines: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """Line, 1-based column and text of the comments; those before a place that is no Python for this interpreter."""
    try:
        for token in tokenize.generate_tokens(io.StringIO("\n".join(lines)).readline):
            if token.type == tokenize.COMMENT and "ddpdoctor" in token.string.lower():
                yield token.start[0], token.start[1] + 1, token.string
    except (tokenize.TokenError, SyntaxError):
        return


def _code_below(lines: Sequence[str]) -> list[int]:
    """For each line, from 0 on, the first line below it that is no comment itself."""
    below = [len(lines) + 1] * (len(lines) + 1)
    for line in range(len(lines) - 1, 0, -1):
        below[line] = below[line + 1] if lines[line].lstrip().startswith("#") else line + 1
    return below
