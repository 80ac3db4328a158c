from __future__ import annotations

import pytest

from tests.grid.judge import MATRIX, Judged, judge_all, matrix

LEAST_FOUND = 0.97


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> list[Judged]:
    return judge_all(tmp_path_factory.mktemp("grid"))


def test_the_grid_has_hundreds_of_pairs(judged: list[Judged]) -> None:
    broken = [tuple(one.case.files.items()) for one in judged if one.case.broken]
    assert len(set(broken)) == len(broken) >= 300


def test_broken_scripts_are_found_at_the_right_line(judged: list[Judged]) -> None:
    broken = [one for one in judged if one.case.broken]
    missed = [(one.case.name, one.said) for one in broken if not one.right]
    assert len(missed) <= (1 - LEAST_FOUND) * len(broken), missed


def test_correct_twins_are_silent(judged: list[Judged]) -> None:
    assert [(one.case.name, one.said) for one in judged if not one.case.broken and not one.right] == []


def test_the_matrix_is_up_to_date(judged: list[Judged]) -> None:
    assert MATRIX.read_text(encoding="utf-8") == matrix(judged)
