"""A part of the table of truth (``python -m tests.truth``), with twice the room: tests run on busy machines."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from tests.truth.measure import PHASES, Row, chapters_of, rows_of

STEPS = 24
ROOM = 2.0
SPECS = (*(f"late:{phase}:30" for phase in PHASES), "barrier:50", "link:0", "link:10", "loader:20", "accumulate:4")


def test_what_is_measured_is_what_happened(tmp_path: Path) -> None:
    assert_true_on(sys.executable, tmp_path)


def assert_true_on(python: str, folder: Path) -> None:
    """The part of the table, with the torch of ``python`` in the ranks."""
    chapters = chapters_of(folder, STEPS, SPECS, python)
    assert [len(track) for chapter in chapters for track in chapter.record.step_tracks] == [STEPS - 3] * 2 * len(SPECS)
    rows = [msgspec.structs.replace(row, allowed=ROOM * row.allowed) for row in rows_of(chapters)]
    assert [f"{row.name}: {row.measured}, truly {row.true}" for row in rows if not row.holds] == []


def test_a_wrong_figure_is_seen() -> None:
    assert Row(name="a", true=20.0, measured=22.9, allowed=3.0).holds
    assert not Row(name="a", true=20.0, measured=23.1, allowed=3.0).holds
    assert not Row(name="a", true="forward", measured="backward").holds
