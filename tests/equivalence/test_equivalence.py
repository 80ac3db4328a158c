"""What differs from one process is told, and nothing is said of what does not differ."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from ddpdoctor.examine.equivalence import _death_in
from ddpdoctor.record.model import Job, Rank, RunRecord
from tests.check_command import check, with_our_tree
from tests.equivalence import against
from tests.equivalence.cases import FAULTS, WRAP, Case
from tests.equivalence.correct import CORRECT
from tests.equivalence.judge import TABLE, compared, complaint

QUICK = tuple(case for case in TABLE if case.quick)
OTHERS = tuple(case for case in TABLE if not case.quick)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case in (FAULTS[0], CORRECT[0]) else pytest.mark.long)
        for case in QUICK
    ],
)
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


def test_a_comparison_that_was_asked_for_and_tells_nothing_is_not_clean(tmp_path: Path) -> None:
    refuses = f'    if dist.get_world_size() < 2:\n        raise RuntimeError("two ranks are needed")\n{WRAP}'
    (tmp_path / "train.py").write_text(CORRECT[0].text().replace(WRAP, refuses), encoding="utf-8")
    options = ("--equivalence", "--time-limit", "400", "--select", "DDP223", "--report", "text=said.txt", "train.py")
    ended, report = check(*options, cwd=tmp_path, XDG_STATE_HOME=str(tmp_path / "state"))
    assert (ended, report["verdict"], report["equivalence"]["status"]) == (3, "inconclusive", "inconclusive")
    assert "two ranks are needed" in report["equivalence"]["reason"]
    said = " ".join((tmp_path / "said.txt").read_text(encoding="utf-8").split())
    assert "1 not evaluated: whether one process would train the same is not known: started as one process" in said


def test_the_command_compares_two_launches(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(against.FAULTS[0].text(), encoding="utf-8")
    other = "torchrun --nproc-per-node 2 train.py sharded sums"
    options = ("--against", other, "--time-limit", "400", "--select", "DDP223", "train.py", "--", "ddp", "none")
    ended, report = check(*options, cwd=tmp_path, XDG_STATE_HOME=str(tmp_path / "state"))
    assert (ended, report["equivalence"]["against"], report["equivalence"]["factor"]) == (1, other, 0.5)
    (finding,) = report["findings"]
    assert f"0.50 × the gradient that `{other}` does" in finding["title"]  # noqa: RUF001


@pytest.mark.parametrize("command", ["python", "torchrun 'train.py"])
def test_a_command_that_is_none_is_refused_before_anything_runs(command: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print()\n", encoding="utf-8")
    line = (sys.executable, "-m", "ddpdoctor", "check", "--against", command, "train.py")
    done = subprocess.run(line, cwd=tmp_path, env=with_our_tree(), capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_rank_that_is_killed_in_a_run_of_the_comparison_is_named_with_its_last_words() -> None:
    tail = "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  [enforce fail] op.nbytes\n"
    record = RunRecord(job=Job(kind="rehearsal", output_tail=tail), ranks=(Rank(rank=0), Rank(rank=1, signal=6)))
    assert _death_in(record) == ": rank 1 was killed by SIGABRT ([enforce fail] op.nbytes)"
    assert _death_in(msgspec.structs.replace(record, ranks=(Rank(rank=0),))) == ""
