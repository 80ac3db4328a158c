"""Bad inputs get one sentence and the right exit code: a few always, 500 behind ``-m full``."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.bad_inputs.case import Case
from tests.bad_inputs.cases import case
from tests.bad_inputs.judge import AT_MOST_S, Answer, answered, slowness

SEED = 0
OFTEN = 24
MANY = 500


@pytest.mark.parametrize("number", range(OFTEN))
def test_a_bad_input_is_answered_well(number: int, tmp_path: Path) -> None:
    _assert_good(*answered(partial(case, number, SEED, rehearsals=False), tmp_path))


@pytest.mark.full
@pytest.mark.parametrize("number", range(MANY))
def test_many_bad_inputs_are_answered_well(number: int, tmp_path: Path) -> None:
    _assert_good(*answered(partial(case, number, SEED + 1), tmp_path))


def test_a_wrong_answer_is_told(tmp_path: Path) -> None:
    def harmless(folder: Path) -> Case:
        (folder / "train.py").write_text("import torch\n")
        return Case(("check", "--static", "train.py", "-o", "report.txt"), frozenset({2}))

    _, answer = answered(harmless, tmp_path)
    assert answer.problems == ("exit code 3, not one of [2]", "made, changed or removed ['report.txt']")


def _assert_good(made: Case, answer: Answer) -> None:
    assert not answer.problems, (made, answer)
    assert answer.seconds < AT_MOST_S or answer.seconds < AT_MOST_S * slowness(), made
