"""The ledger of first sight: every row is whole, no case is there twice, and its judgement follows from it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.first_seen import ledger
from tests.first_seen.ledger import NEWEST, Came, Expected, Row, append, is_right, rows, table

ROOT = Path(__file__).parents[2]
OLDEST = 115
"""Rows that were there when this was written; rows are appended and never taken out."""
SAID = Came(code="DDP301", severity="error", path="train.py", line=3, judged="wrong")


def test_every_row_is_whole_and_no_case_is_there_twice() -> None:
    entered = rows()
    assert len(entered) >= OLDEST
    assert [case for case, count in Counter((row.kind, row.case) for row in entered).items() if count > 1] == []
    assert [row.case for row in entered if row.right is not is_right(row.expected, row.came)] == []
    assert all(row.date and row.commit and row.case for row in entered)


def test_a_case_is_right_when_nothing_certain_is_missed_and_nothing_loud_is_wrong() -> None:
    missed = Expected(codes=("DDP102",), lines=(4,))
    assert not is_right([missed], [])
    assert is_right([Expected(codes=("DDP102",), certainty="likely"), Expected(codes=("DDP506",))], [])
    assert not is_right([], [SAID])
    assert is_right([], [Came(code="DDP605", severity="advice", path="train.py", line=3, judged="wrong")])


def test_the_table_counts_what_was_said_and_what_was_found() -> None:
    found = Expected(codes=("DDP102",), found=True)
    row = Row(
        date="2026-11-26",
        kind="source",
        case="x",
        commit="y",
        expected=(found, Expected(codes=("DDP101",)), Expected(codes=("DDP506",))),
        came=(SAID, Came(code="DDP102", severity="warning", path="train.py", line=9, judged="right")),
    )
    rates = table([row])
    assert rates["errors right"] == (0, 1)
    assert rates["warnings right"] == (1, 1)
    assert rates["certain defects found"] == (1, 2)
    assert rates["cases right as a whole"] == (0, 1)


def test_the_documents_show_what_the_ledger_says() -> None:
    shown = (ROOT / "docs" / "check.md").read_text(encoding="utf-8")
    own = [row for row in rows() if row.kind == "source"]
    newest = table(own[-NEWEST:])
    for name, (part, whole) in table(own).items():
        assert f"| {name} | {part} of {whole} | {newest[name][0]} of {newest[name][1]} |" in shown


def test_a_case_is_entered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "LEDGER", tmp_path / "ledger.jsonl")
    row = Row(date="2026-11-26", kind="source", case="x", commit="y")
    append([row])
    with pytest.raises(ValueError, match="x was seen before"):
        append([row])
    assert rows() == (row,)
