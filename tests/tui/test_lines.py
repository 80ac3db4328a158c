"""Lines, charts and tables as plain data: widths hold, whatever is in them."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpdoctor.tui.draw.cells import Cell, cut, cut_left, fitted, line, padded, shown, width_of, wrapped
from ddpdoctor.tui.draw.charts import ceiling_of, columns_of, gauge, heat_strip, newest, phase_bar, spread, top_of
from ddpdoctor.tui.draw.glyphs import ASCII, UNICODE, chosen_glyphs, palette_of, plain_text
from ddpdoctor.tui.draw.table import Column, Cursor, fit_columns, paint_table
from tests.tui import runs

HOSTILE = st.text(
    st.sampled_from(
        "ab \t\n\x1b[]\x07\x9b\u202e\u05d0\u0644\u0301\u200d\ufe0f\U0001f600\U0001f468漢字" + string.punctuation
    )
)


@given(HOSTILE, st.integers(1, 40))
def test_a_text_from_outside_takes_exactly_its_columns(text: str, width: int) -> None:
    safe = shown(text)
    assert not any(ord(character) < 32 or 0x7F <= ord(character) < 0xA0 for character in safe)
    assert width_of((Cell(padded(safe, width)),)) == width
    assert width_of(fitted(line(Cell(safe, "bad"), "tail"), width)) == width
    assert all(width_of((Cell(words),)) <= width for words in wrapped(safe, width)) or width < 2


def test_what_terminals_draw_in_ways_of_their_own_is_spelled_out() -> None:
    assert shown("\u05d0b") == "\\u05d0b"
    assert shown("\x1b[31mred") == "\\x1b[31mred"
    assert shown("e\u0301\u200d") in ("e\\u200d", "e")
    assert len(shown("x" * 10_000)) == 2_000


def test_the_end_of_a_path_says_more() -> None:
    assert cut_left("/a/long/way/train.py:88", 12) == "…train.py:88"
    assert cut("a long title", 8) == "a long…"


def test_a_word_that_is_broken_leaves_no_line_too_wide() -> None:
    assert wrapped(":::: :::", 2) == ["::", "::", "::", ":"]


def test_no_line_is_broken_between_a_number_and_its_unit() -> None:
    assert wrapped("waits for 269 ms", 13) == ["waits for", "269 ms"]


def test_all_columns_of_a_bar_are_shared_out() -> None:
    assert columns_of([1, 1, 1], 10) == [4, 3, 3]
    assert columns_of([0, 0], 10) == [0, 0]
    for width in (1, 7, 40, 200):
        assert width_of(phase_bar(runs.phases(), width, True)) == width
        assert width_of(phase_bar(runs.phases(), width, False)) == width


def test_a_series_moves_by_whole_columns_and_keeps_unknown_ones_empty() -> None:
    assert newest([1.0, None, 3.0], 5) == [None, None, 1.0, None, 3.0]
    assert newest([1.0, 2.0, 3.0], 2) == [2.0, 3.0]
    assert newest([1.0, 2.0], 5) == [None, 1.0, 1.0, 2.0, 2.0]
    assert newest([1.0], 6) == [None, None, 1.0, 1.0, 1.0, 1.0]
    assert [cell.text for cell in heat_strip([None, 0.0, 9.0], 10.0, 3, UNICODE)] == [" ", "▁", "█"]
    assert top_of([0.186, None]) == pytest.approx(0.2)
    assert top_of([]) == 1.0
    for last, beyond in ((12.0, 12.5), (None, None)):
        high, above = ceiling_of([0.18, 0.19, last], [0.21, 0.3, last and 12.5])
        assert (round(high, 6), above) == (0.3, beyond)
    rows = spread([5.0], [10.0], 2, 2, UNICODE, 10.0)
    assert [[cell.text for cell in row] for row in rows] == [[" █"], [" ", "█"]] or width_of(rows[0]) == 2


def test_a_gauge_shows_that_there_is_something() -> None:
    assert "".join(cell.text for cell in gauge(0.001, 10, ASCII, "good")) == "#........."
    assert "".join(cell.text for cell in gauge(None, 10, ASCII, "good", 0.2)) == "..|......."
    assert "".join(cell.text for cell in gauge(3.0, 10, ASCII, "good")) == "##########"


@pytest.mark.parametrize(
    ("environment", "plain"),
    [
        ({"TERM": "xterm", "LANG": "en_US.UTF-8"}, False),
        ({"TERM": "xterm", "LANG": "C"}, True),
        ({"TERM": "xterm", "LANG": "en_US.UTF-8", "LC_ALL": "C"}, True),
        ({"TERM": "linux", "LANG": "C.UTF-8"}, True),
        ({"TERM": "dumb", "LANG": "C.UTF-8"}, True),
        ({"TERM": "xterm"}, True),
        ({"TERM": "screen-256color", "LC_CTYPE": "de_DE.utf8"}, False),
    ],
)
def test_ascii_is_drawn_where_there_is_no_more(environment: dict[str, str], plain: bool) -> None:
    assert chosen_glyphs(environment).plain is plain


def test_plain_text_takes_the_same_columns() -> None:
    text = "61.2 µs — 88 °C … 漢"
    assert plain_text(text) == "61.2 us - 88  C ~ ??"


def test_every_role_has_a_style_in_every_tone() -> None:
    roles = [set(palette_of(tone).styles) for tone in ("dark", "light", "none")]
    assert roles[0] == roles[1] == roles[2]
    assert all(style.color is None and style.bgcolor is None for style in palette_of("none").styles.values())
    with pytest.raises(KeyError):
        palette_of("dark").style("no such role")


def _columns() -> list[Column[int]]:
    def cell(row: int, width: int) -> Cell:
        return Cell(f"{row}")

    return [
        Column(name="a", title="a", width=5, importance=1, cell=cell, key=lambda row: row),
        Column(name="b", title="b", width=5, most=9, importance=3, cell=cell, key=lambda row: row if row % 2 else None),
        Column(name="c", title="c", width=10, most=-1, importance=2, cell=cell),
    ]


@pytest.mark.parametrize(
    ("width", "kept"), [(4, "a:4"), (16, "a:5"), (17, "a:5 c:10"), (24, "a:5 b:5 c:10"), (50, "a:5 b:9 c:32")]
)
def test_the_most_important_columns_stay(width: int, kept: str) -> None:
    assert " ".join(f"{column.name}:{wide}" for column, wide in fit_columns(_columns(), width)) == kept


def test_rows_without_a_value_come_last_in_either_order() -> None:
    for descending, expected in ((False, "1 3 0 2 4"), (True, "3 1 0 2 4")):
        cursor = Cursor(sort="b", descending=descending)
        painted = paint_table(range(5), _columns(), str, cursor, 40, 10, UNICODE)
        assert " ".join(painted.rows) == expected


def test_only_rows_in_sight_are_drawn_and_the_cursor_is_among_them() -> None:
    drawn = []

    def cell(row: int, width: int) -> Cell:
        drawn.append(row)
        return Cell(str(row))

    columns = [Column(name="a", title="a", width=5, importance=1, cell=cell)]
    painted = paint_table(range(100_000), columns, str, Cursor(selected="77"), 40, 11, UNICODE)
    assert drawn == list(range(68, 78))
    assert painted.top == 68
    again = paint_table(range(100_000), columns, str, Cursor(selected="70", top=68), 40, 11, UNICODE)
    assert again.top == 68
