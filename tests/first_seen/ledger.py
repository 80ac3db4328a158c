"""The ledger: one row a case, appended when the tool has seen it for the first time, and never changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

LEDGER = Path(__file__).with_name("ledger.jsonl")
NEWEST = 60
"""Rows of a kind that the second column is about."""
Kind = Literal["source", "rehearsal", "live", "autopsy", "equivalence", "puzzle", "resume"]
Judgement = Literal["right", "wrong", "debatable"]


class Expected(msgspec.Struct, frozen=True):
    """Something that a person found before the tool saw the case."""

    codes: tuple[str, ...]
    """In a row of the kind ``equivalence``: ``equal``, or how the gradients differ. Of ``resume``: what a restart loses
    (``optimizer``, ``data``, ``counter`` …), that it ``fails``, or ``resumes``; ``inconclusive`` where none is seen."""
    lines: tuple[int, ...] = ()
    certainty: Literal["certain", "likely", "debatable"] = "certain"
    path: str = ""
    """The file, where it is not that of the case."""
    found: bool = False
    """The tool reported it."""


class Came(msgspec.Struct, frozen=True):
    """Something that the tool said."""

    code: str
    severity: str
    path: str
    line: int
    judged: Judgement
    why: str = ""
    """The reader's reason, where no label speaks of it."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One case at first sight."""

    date: str
    kind: Kind
    case: str
    """Where it is from: ``OWNER/NAME@COMMIT:PATH``, or a name."""
    commit: str
    """Of the tool."""
    expected: tuple[Expected, ...] = ()
    came: tuple[Came, ...] = ()
    right: bool = False
    """Nothing wrong was said as more than advice, and everything certain was found (but for groups never destroyed)."""
    draw: int = 1
    """Cases that were labelled together."""


def rows() -> tuple[Row, ...]:
    """Return all rows, in the order of their entry."""
    lines = LEDGER.read_bytes().splitlines() if LEDGER.is_file() else []
    return tuple(msgspec.json.decode(line, type=Row) for line in lines)


def append(new: Iterable[Row]) -> None:
    """Enter rows; raises ValueError for a case that the ledger has already."""
    known = {(row.kind, row.case) for row in rows()}
    with LEDGER.open("ab") as ledger:
        for row in new:
            if (row.kind, row.case) in known:
                raise ValueError(f"{row.case} was seen before")
            ledger.write(msgspec.json.encode(row) + b"\n")


def is_right(expected: Iterable[Expected], came: Iterable[Came]) -> bool:
    """Return whether a case was right as a whole."""
    missed = any(one.certainty == "certain" and not one.found and one.codes != ("DDP506",) for one in expected)
    return not missed and not any(one.severity != "advice" and one.judged == "wrong" for one in came)


def table(chosen: Sequence[Row]) -> dict[str, tuple[int, int]]:
    """Return the rates of some rows, each as a part and the whole that it is of."""
    said = [one for row in chosen for one in row.came if one.judged != "debatable"]
    # How a start ended stands among what came, under this code.
    advice = [one for row in chosen for one in row.came if one.severity == "advice" and one.code != "start"]
    wanted = [one for row in chosen for one in row.expected if one.codes != ("DDP506",)]

    def share(severity: str) -> tuple[int, int]:
        judged = [one.judged == "right" for one in said if one.severity == severity]
        return sum(judged), len(judged)

    def recall(*certainties: str) -> tuple[int, int]:
        found = [one.found for one in wanted if one.certainty in certainties]
        return sum(found), len(found)

    return {
        "errors right": share("error"),
        "warnings right": share("warning"),
        "advice the reader wrote down too": (sum(one.judged == "right" for one in advice), len(advice)),
        "certain defects found": recall("certain"),
        "certain and likely ones found": recall("certain", "likely"),
        "cases right as a whole": (sum(row.right for row in chosen), len(chosen)),
    }
