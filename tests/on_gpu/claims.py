"""What a part claims, what it measured, and whether that is right. Only the standard library is needed here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Outcome = Literal["right", "WRONG", "not here", "not measured"]


@dataclass(frozen=True)
class Claim:
    """One sentence that a part proves or refutes."""

    text: str
    expected: str
    pretends: bool = False
    """It can be judged without a GPU, too."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    part: str
    key: str
    claim: str
    expected: str
    measured: str
    outcome: Outcome
    note: str = ""


class Bench:
    """What a part gets: a folder, and a place for its rows, each of which is on disk once it is known."""

    def __init__(self, part: str, claims: Mapping[str, Claim], folder: Path, rows: Path, *, pretends: bool) -> None:
        self.folder = folder
        self.pretends = pretends
        self._part, self._claims, self._rows = part, claims, rows

    def judge(self, key: str, right: bool, measured: object, *, expected: str = "", note: str = "") -> None:
        """Add the row of a claim; ``expected`` is its own words where nothing else is given."""
        self._add(key, expected or self._claims[key].expected, f"{measured}", "right" if right else "WRONG", note)

    def same(self, key: str, expected: object, measured: object, note: str = "") -> None:
        """Judge whether two things are equal."""
        self.judge(key, expected == measured, measured, expected=f"{expected}", note=note)

    def near(self, key: str, truth: float | None, measured: float | None, *, share: float = 0, plus: float = 0) -> None:
        """Judge whether a figure is within a share of the truth, or within ``plus`` of it; None is wrong."""
        right = None not in (truth, measured) and abs((measured or 0) - (truth or 0)) <= share * abs(truth or 0) + plus
        margin = " or ".join(filter(None, (f"{share:.0%}" if share else "", f"{plus:g}" if plus else "")))
        self.judge(key, right, _figure(measured), expected=f"{_figure(truth)} within {margin}")

    def leave_out(self, key: str, why: str) -> None:
        """Say why a claim cannot be judged on this machine."""
        self._add(key, self._claims[key].expected, "", "not here", why)

    def _add(self, key: str, expected: str, measured: str, outcome: Outcome, note: str) -> None:
        row = Row(self._part, key, self._claims[key].text, expected, measured, outcome, note)
        with self._rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")


def rows_of(path: Path) -> list[Row]:
    """Return what a part has written, without a last line that was cut off."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            found.append(Row(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return found


def with_missing(rows: list[Row], part: str, claims: Mapping[str, Claim], *, pretends: bool, why: str) -> list[Row]:
    """Return a row for each claim: those that no row was written for say why."""
    known = {row.key for row in rows}
    return rows + [
        Row(part, key, claim.text, claim.expected, "", "not here", "needs a GPU")
        if pretends and not claim.pretends
        else Row(part, key, claim.text, claim.expected, "", "not measured", why)
        for key, claim in claims.items()
        if key not in known
    ]


def table_of(rows: list[Row]) -> str:
    """Return the rows as text: claim, expected, measured, right or not."""
    lines = []
    for number, row in enumerate(rows):
        if number == 0 or rows[number - 1].part != row.part:
            lines.append(f"{row.part}")
        lines.append(f"  {row.outcome:<12}  {row.claim}")
        said = row.measured + (f" ({row.note})" if row.note and row.measured else row.note)
        if row.outcome == "not here":
            lines.append(f"{'':16}{said}")
        else:
            lines.append(f"{'':16}expected {_one_line(row.expected)}; measured {_one_line(said) or 'nothing'}")
    return "\n".join(lines)


def _one_line(text: str, most: int = 400) -> str:
    text = re.sub(r"\s+", " ", text)
    return text if len(text) <= most else text[: most - 1] + "…"


def _figure(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.6g}"
