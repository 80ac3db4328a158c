"""What differs from one process is told, and nothing is said of what does not differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.check_command import check
from tests.equivalence.cases import FAULTS, Case
from tests.equivalence.correct import CORRECT
from tests.equivalence.judge import TABLE, compared, complaint

QUICK = tuple(case for case in TABLE if case.quick)
OTHERS = tuple(case for case in TABLE if not case.quick)


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_each_kind_is_told_and_each_twin_is_left_alone(case: Case) -> None:
    assert complaint(case, compared(case)) == ""


@pytest.mark.full
@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.name)
def test_the_whole_table(case: Case) -> None:
    assert complaint(case, compared(case)) == ""


@pytest.mark.parametrize(("case", "code"), [(FAULTS[0], 1), (CORRECT[0], 0)], ids=["summed", "correct"])
def test_the_command_tells_it_with_the_line(case: Case, code: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(case.text(), encoding="utf-8")
    options = ("--equivalence", "--time-limit", "400", "--select", "DDP223")
    ended, report = check(*options, "train.py", cwd=tmp_path, XDG_STATE_HOME=str(tmp_path / "state"))
    assert ended == code
    said = report["equivalence"]
    assert said["status"] == ("differs" if code else "equal")
    if code:
        (finding,) = report["findings"]
        assert (
            "2.00" in finding["title"] and "backward" in case.text().splitlines()[finding["locations"][0]["line"] - 1]
        )
    else:
        assert any("compute the gradient that one process would" in note for note in report["rehearsal"]["notes"])
