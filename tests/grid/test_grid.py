from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.source.script.script import read_script
from tests.grid.judge import MATRIX, Judged, divergences, judge_all, matrix
from tests.grid.strategies import ALONG, ALONG_A_DIMENSION, ENGINE, OF_ENGINES, sharded_grid

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


def test_divergences_of_sharded_models_are_found_and_their_twins_are_not(tmp_path: Path) -> None:
    judged = judge_all(tmp_path, sharded_grid(places=("direct", "method"), forms=("call", "function")))
    assert [one.case.name for one in judged if not one.right] == []
    assert len(judged) > 1_000


@pytest.mark.parametrize("name", ALONG_A_DIMENSION)
def test_a_collective_along_a_dimension_of_a_mesh(name: str, tmp_path: Path) -> None:
    shape, body, broken = ALONG_A_DIMENSION[name]
    script = tmp_path / "train.py"
    script.write_text(ALONG.replace("SHAPE", shape) + body)
    assert bool(divergences(read_script(script))) is broken


@pytest.mark.parametrize("name", OF_ENGINES)
def test_what_an_engine_does_together_depends_on_its_stage(name: str, tmp_path: Path) -> None:
    config, body, broken = OF_ENGINES[name]
    script = tmp_path / "train.py"
    script.write_text(ENGINE.replace("CONFIG", config) + body)
    assert bool(divergences(read_script(script))) is broken
