"""The catalogue: what programs print when a job dies, as rows of data, and the one that a text fits."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, cast

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
    "segfault": 11,
    "terminated": 15,
    "aborted": 6,
    "floating point exception": 8,
    **{form.lower(): int(one) for name, one in signal.Signals.__members__.items() for form in (name, name[3:])},
}
_NO_DIGITS = str.maketrans("123456789", "0" * 9)
_PLACES: dict[tuple[_Where, str], int] = {}
"""Which row texts fit that differ in their figures only: of a statement a dying job writes thousands."""
_NONE = -1
_MOST_RANKS = 100_000
_MOST_KEPT, _LONGEST_KEPT = 4_096, 600
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]])*\]|.", re.DOTALL)
_TIMES = re.compile(r"(?:[*+?]|\{[\d,]+\})?[?+]?")
_OPTIONAL = frozenset("?*{")
_GROUP = re.compile(r"\((?:\?(?:[a-z]*(?:-[a-z]+)?:|P<\w+>)|(?!\?))")
"""The beginning of a group that has to be there; not that of a look ahead or behind."""
_SHORTEST_WORD = 3


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


class _Index(msgspec.Struct, frozen=True):
    """The rows of a place, and how the few are found that a text may fit: each is searched for only where a word of it
    is in the text.
    """

    rows: tuple[tuple[Row, re.Pattern[str]], ...]
    words: re.Pattern[str]
    places: Mapping[str, frozenset[int]]
    """Rows by their words, in small letters; by an empty one those of which no word is known."""

    def likely(self, text: str) -> list[int]:
        """Return the places of the rows that a text may fit, in their order."""
        text = text.lower()
        found, match = set(self.places.get("", ())), self.words.search(text)
        while match:
            found |= self.places[match[0]]
            match = self.words.search(text, match.start() + 1)
        return sorted(found)


@lru_cache(maxsize=3)
def index_of(where: _Where) -> _Index:
    """Return the index of the rows of a place."""
    chosen = [row for row in (rows_of_nccl() if where == "nccl" else rows()) if row.anywhere or where != "anywhere"]
    places: dict[str, frozenset[int]] = {}
    named = sorted({(word, place) for place, row in enumerate(chosen) for word in _words_of(row.pattern)}, key=_length)
    for word, place in named:
        # No word is the beginning of another one: at a position of a text one of them is looked for.
        shorter = next((one for one in places if one and word.startswith(one)), word)
        places[shorter] = places.get(shorter, frozenset()) | {place}
    groups: dict[str, list[str]] = {}
    for word in filter(None, places):
        groups.setdefault(word[0], []).append(re.escape(word[1:]))
    pattern = "|".join(f"{re.escape(first)}(?:{'|'.join(rest)})" for first, rest in groups.items())
    compiled = tuple((row, re.compile(row.pattern, re.IGNORECASE)) for row in chosen)
    return _Index(rows=compiled, words=re.compile(pattern), places=places)


def _length(named: tuple[str, int]) -> tuple[int, str, int]:
    return len(named[0]), *named


def counts_at_any_level(text: str) -> bool:
    """Return whether a line reports a failure though its logger calls it a warning, or information."""
    index = index_of("anywhere")
    return any(
        row.any_level and pattern.search(text) for row, pattern in map(index.rows.__getitem__, index.likely(text))
    )


def _words_of(pattern: str) -> set[str]:
    """Return words one of which is in every text that a pattern fits; an empty one among them: that is not known."""
    branches: list[list[tuple[str, str]]] = [[]]
    for part, times in _parts(pattern):
        if part == "|":
            branches.append([])
        else:
            branches[-1].append((part, times))
    words = {word for branch in branches for word in _words_of_branch(branch)}
    return words if min(map(len, words)) >= _SHORTEST_WORD else {""}


def _words_of_branch(parts: Iterable[tuple[str, str]]) -> set[str]:
    """Return the longest run of letters and signs, or the words of a group if those are longer."""
    runs, groups = [""], []
    for part, times in parts:
        optional, escaped = times[:1] in _OPTIONAL, part[0] == "\\"
        plain = not optional and (not part[-1].isalnum() if escaped else len(part) == 1 and part not in ".^$")
        if plain:
            runs[-1] += part[-1].lower()
        elif not optional and (group := _GROUP.match(part)):
            groups.append(_words_of(part[group.end() : -1]))
        if times or not plain:
            runs.append("")
    return max([{max(runs, key=len)}, *groups], key=lambda words: min(map(len, words)))


def _parts(pattern: str) -> Iterator[tuple[str, str]]:
    """Yield the parts of a pattern, a group as one, each with what says how often it comes."""
    place = 0
    while place < len(pattern):
        start, depth = place, 0
        while place == start or depth:
            token = cast("re.Match[str]", _TOKEN.match(pattern, place))
            depth += (token[0] == "(") - (token[0] == ")")
            place = token.end()
        times = cast("re.Match[str]", _TIMES.match(pattern, place))
        yield pattern[start:place], times[0]
        place = times.end()


def statement_in(text: str, *, anywhere: bool = False) -> Statement | None:
    """Return the first row that a text fits; ``anywhere``: only of those that count in the line of any program."""
    return _first("anywhere" if anywhere else "any", text)


def statement_of_nccl(text: str) -> Statement | None:
    """Return the first row that a warning of NCCL fits, by what stands behind ``NCCL WARN``."""
    return _first("nccl", text)


def _first(where: _Where, text: str) -> Statement | None:
    index = index_of(where)
    kind = (where, text.translate(_NO_DIGITS)) if len(text) <= _LONGEST_KEPT else None
    place = _PLACES.get(kind) if kind is not None else None
    if place is None:
        place = next((place for place in index.likely(text) if index.rows[place][1].search(text)), _NONE)
        if kind is not None:
            if len(_PLACES) >= _MOST_KEPT:
                _PLACES.clear()
            _PLACES[kind] = place
    if place == _NONE:
        return None
    row, pattern = index.rows[place]
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
    if "ready" in found:
        came = {int(number) for number in re.findall(r"\d+", found["ready"])}
        fields["absent"] = tuple(rank for rank in range(min(max(came), _MOST_RANKS)) if rank not in came)
    if "pid" in found:
        fields["pid"] = int(found["pid"])
    if "signal" in found:
        fields["signal"] = _SIGNALS.get(found["signal"].strip().lower())
    if "code" in found:
        fields["exit_code"] = int(found["code"])
    if "seconds" in found:
        fields["timeout_ns"] = int(found["seconds"]) * 1_000_000_000
    if host := found.get("host") or found.get("host2"):
        fields["host"] = host
    return fields | {name: found[name] for name in ("peer", "collective", "process") if name in found}
