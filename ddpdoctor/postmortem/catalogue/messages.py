"""The catalogue: what programs print when a job dies, as rows of data, and the one that a text fits."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from ddpdoctor.finding import Trouble
from ddpdoctor.record.streams.devices import IncidentKind

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MESSAGES = Path(__file__).with_name("messages.toml")
_SIGNALS = {
    "killed": 9,
    "bus error": 7,
    "segmentation fault": 11,
    "terminated": 15,
    "aborted": 6,
    "floating point exception": 8,
}
_NAMED = re.compile(r"\(\?P<\w+>")


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One statement of one program; the fields are described at the head of the data."""

    program: str
    pattern: str
    event: IncidentKind
    trouble: Trouble
    role: Literal["cause", "echo"] = "cause"
    anywhere: bool = False
    type: str = ""
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
    return tuple(msgspec.convert(tomllib.loads(MESSAGES.read_text(encoding="utf-8"))["message"], list[Row]))


@lru_cache(maxsize=1)
def _compiled() -> tuple[tuple[Row, re.Pattern[str]], ...]:
    return tuple((row, re.compile(row.pattern, re.IGNORECASE)) for row in rows())


@lru_cache(maxsize=2)
def _any(*, anywhere: bool) -> re.Pattern[str]:
    """One pattern for all rows: most texts fit none."""
    chosen = [_NAMED.sub("(?:", row.pattern) for row in rows() if row.anywhere or not anywhere]
    return re.compile("|".join(chosen), re.IGNORECASE)


def statement_in(text: str, *, anywhere: bool = False) -> Statement | None:
    """Return the first row that a text fits; ``anywhere``: only of those that count in the line of any program."""
    if not _any(anywhere=anywhere).search(text):
        return None
    for row, pattern in _compiled():
        if (row.anywhere or not anywhere) and (match := pattern.search(text)):
            return Statement(row=row, fields=_fields(match), name=match.groupdict().get("name") or "")
    return None


def _fields(match: re.Match[str]) -> dict[str, Any]:
    found = {name: text for name, text in match.groupdict().items() if text is not None}
    fields: dict[str, Any] = {}
    if absent := found.get("absent") or found.get("absent2"):
        fields["absent"] = tuple(int(number) for number in re.findall(r"\d+", absent))
    if "pid" in found:
        fields["pid"] = int(found["pid"])
    if "signal" in found:
        fields["signal"] = _SIGNALS.get(found["signal"].strip().lower())
    if "seconds" in found:
        fields["timeout_ns"] = int(found["seconds"]) * 1_000_000_000
    return fields | {name: found[name] for name in ("peer", "host") if name in found}
