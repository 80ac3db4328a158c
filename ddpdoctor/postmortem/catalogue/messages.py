"""The catalogue: what programs print when a job dies, as rows of data, and the one that a text fits."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from ddpdoctor.finding import Trouble
from ddpdoctor.record.streams.setup import IncidentKind

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_FILES = ("messages.toml", "torch.toml", "python.toml")
_NCCL = "nccl.toml"
_Where = Literal["any", "anywhere", "nccl"]
"""An exception or a line of torch's C++ side, the line of any program, a warning of NCCL."""
_SIGNALS = {
    "killed": 9,
    "bus error": 7,
    "segmentation fault": 11,
    "terminated": 15,
    "aborted": 6,
    "floating point exception": 8,
    **{name.lower(): int(one) for name, one in signal.Signals.__members__.items()},
}
_NO_DIGITS = str.maketrans("123456789", "0" * 9)
_PLACES: dict[tuple[_Where, str], int] = {}
"""Which row texts fit that differ in their figures only: of a statement a dying job writes thousands."""
_NONE = -1
_MOST_KEPT, _LONGEST_KEPT = 4_096, 600
_BEGINS_WITH_A_LETTER = re.compile(r"[A-Za-z](?![?*{|])")
_NAMED = re.compile(r"\(\?P<\w+>")


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One statement of one program; the fields are described at the head of the data."""

    program: str
    pattern: str
    event: IncidentKind
    trouble: Trouble
    role: Literal["cause", "echo", "noise"] = "cause"
    anywhere: bool = False
    any_level: bool = False
    nccl: bool = False
    type: str = ""
    implies: str = ""
    source: str
    example: str


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """A row that fits a text, with what the text says in it."""

    row: Row
    fields: Mapping[str, Any]
    """Of an incident."""
    name: str = ""
    """The part of the text that names the error."""


@lru_cache(maxsize=1)
def rows() -> tuple[Row, ...]:
    """Return the rows, in their order of precedence."""
    return tuple(row for name in _FILES for row in _read(name))


@lru_cache(maxsize=1)
def rows_of_nccl() -> tuple[Row, ...]:
    """Return the rows that a warning of NCCL is compared with, in their order of precedence."""
    return (*(row for row in rows() if row.nccl), *_read(_NCCL))


def _read(name: str) -> list[Row]:
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text)["message"], list[Row])


@lru_cache(maxsize=3)
def _compiled(where: _Where) -> tuple[tuple[Row, re.Pattern[str]], ...]:
    chosen = rows_of_nccl() if where == "nccl" else rows()
    return tuple((row, re.compile(row.pattern, re.IGNORECASE)) for row in chosen if row.anywhere or where != "anywhere")


@lru_cache(maxsize=1)
def _of_any_level() -> re.Pattern[str]:
    among = [row for row in rows() if row.any_level and row.anywhere]
    return re.compile("|".join(_NAMED.sub("(?:", row.pattern) for row in among), re.IGNORECASE)


def counts_at_any_level(text: str) -> bool:
    """Return whether a line reports a failure though its logger calls it a warning, or information."""
    return _of_any_level().search(text) is not None


@lru_cache(maxsize=2)
def _any(where: _Where) -> re.Pattern[str]:
    """One pattern for all rows: most texts fit none.

    Its alternatives are grouped by their first letter: of hundreds a position of the text is compared with a few.
    """
    groups: dict[str, list[str]] = {}
    for row, _ in _compiled(where):
        for branch in _branches(_NAMED.sub("(?:", row.pattern)):
            first = branch[0].lower() if _BEGINS_WITH_A_LETTER.match(branch) else ""
            groups.setdefault(first, []).append(branch)
    apart = groups.pop("", [])
    return re.compile("|".join([*(f"(?={first})(?:{'|'.join(one)})" for first, one in groups.items()), *apart]), re.I)


def _branches(pattern: str) -> list[str]:
    """Return the alternatives of a pattern, those within parentheses left as they are."""
    found, depth, start, in_set = [], 0, 0, False
    place = 0
    while place < len(pattern):
        character = pattern[place]
        if character == "\\":
            place += 1
        elif in_set:
            in_set = character != "]"
        elif character == "[":
            in_set = True
        elif character in "()":
            depth += 1 if character == "(" else -1
        elif character == "|" and not depth:
            found.append(pattern[start:place])
            start = place + 1
        place += 1
    return [*found, pattern[start:]]


def statement_in(text: str, *, anywhere: bool = False) -> Statement | None:
    """Return the first row that a text fits; ``anywhere``: only of those that count in the line of any program."""
    return _first("anywhere" if anywhere else "any", text)


def statement_of_nccl(text: str) -> Statement | None:
    """Return the first row that a warning of NCCL fits, by what stands behind ``NCCL WARN``."""
    return _first("nccl", text)


def _first(where: _Where, text: str) -> Statement | None:
    compiled = _compiled(where)
    kind = (where, text.translate(_NO_DIGITS)) if len(text) <= _LONGEST_KEPT else None
    place = _PLACES.get(kind) if kind is not None else None
    if place is None:
        likely = where == "nccl" or _any(where).search(text) is not None
        fits = (place for place, (_, pattern) in enumerate(compiled) if pattern.search(text)) if likely else iter(())
        place = next(fits, _NONE)
        if kind is not None:
            if len(_PLACES) >= _MOST_KEPT:
                _PLACES.clear()
            _PLACES[kind] = place
    if place == _NONE:
        return None
    row, pattern = compiled[place]
    match = pattern.search(text)
    if match is None:
        return None
    return Statement(row=row, fields=_fields(match, row), name=match.groupdict().get("name") or "")


def _fields(match: re.Match[str], row: Row) -> dict[str, Any]:
    found = {name: text for name, text in match.groupdict().items() if text is not None}
    fields: dict[str, Any] = {"implies": row.implies} if row.implies else {}
    if row.event == "nccl" and row.role == "echo":
        fields["passed_on"] = True
    if absent := found.get("absent") or found.get("absent2"):
        fields["absent"] = tuple(int(number) for number in re.findall(r"\d+", absent))
    if "pid" in found:
        fields["pid"] = int(found["pid"])
    if "signal" in found:
        fields["signal"] = _SIGNALS.get(found["signal"].strip().lower())
    if "seconds" in found:
        fields["timeout_ns"] = int(found["seconds"]) * 1_000_000_000
    if host := found.get("host") or found.get("host2"):
        fields["host"] = host
    return fields | {name: found[name] for name in ("peer",) if name in found}
