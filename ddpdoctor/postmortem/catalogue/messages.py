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
from ddpdoctor.record.streams.incidents import IncidentKind

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_FILES = ("messages.toml", "torch.toml")
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
}
_NAMED = re.compile(r"\(\?P<\w+>")


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One statement of one program; the fields are described at the head of the data."""

    program: str
    pattern: str
    event: IncidentKind
    trouble: Trouble
    role: Literal["cause", "echo", "noise"] = "cause"
    anywhere: bool = False
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


@lru_cache(maxsize=2)
def _any(where: _Where) -> re.Pattern[str]:
    """One pattern for all rows: most texts fit none."""
    return re.compile("|".join(_NAMED.sub("(?:", row.pattern) for row, _ in _compiled(where)), re.IGNORECASE)


def statement_in(text: str, *, anywhere: bool = False) -> Statement | None:
    """Return the first row that a text fits; ``anywhere``: only of those that count in the line of any program."""
    where: _Where = "anywhere" if anywhere else "any"
    return _first(where, text) if _any(where).search(text) else None


def statement_of_nccl(text: str) -> Statement | None:
    """Return the first row that a warning of NCCL fits, by what stands behind ``NCCL WARN``."""
    return _first("nccl", text)


def _first(where: _Where, text: str) -> Statement | None:
    for row, pattern in _compiled(where):
        if match := pattern.search(text):
            return Statement(row=row, fields=_fields(match, row), name=match.groupdict().get("name") or "")
    return None


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
    return fields | {name: found[name] for name in ("peer", "host") if name in found}
