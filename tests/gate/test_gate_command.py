"""The gate on real ranks, in one story: agreed on, green, red with the line, green again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.equivalence.cases import FAULTS
from tests.equivalence.correct import CORRECT
from tests.gate.command import gate, report
from tests.gate.scripts import BROKEN, HEALTHY


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose baseline is written."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "train.py").write_text(HEALTHY)
    done = gate("train.py", "--update", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ddpdoctor-baseline.json is written" in done.stdout
    return folder


def test_the_same_script_is_green_and_its_budget_bit_equal(project: Path) -> None:
    (project / "train.py").write_text(f"# a line more\n{HEALTHY}")
    before = (project / "ddpdoctor-baseline.json").read_bytes()
    code, found = report("train.py", "--prune", cwd=project)
    assert (code, found["verdict"]) == (0, "clean")
    assert {figure["change"] for figure in found["gate"]["budget"]} == {"same"}
    assert found["gate"]["steps"] == 6
    (project / "train.py").write_text(HEALTHY)
    report("train.py", "--update", cwd=project)
    assert (project / "ddpdoctor-baseline.json").read_bytes() == before


def test_what_a_step_needs_more_is_red_with_the_line_that_brought_it(project: Path) -> None:
    script, code_wanted, words = BROKEN["collective"]
    (project / "train.py").write_text(script)
    code, found = report("train.py", cwd=project)
    assert (code, found["verdict"]) == (1, "findings")
    (finding,) = [one for one in found["findings"] if one["code"] == code_wanted]
    assert words in finding["title"]
    line = script.splitlines().index("            dist.all_reduce(torch.zeros(3))") + 1
    assert [place["line"] for place in finding["locations"]] == [line]


def test_a_cause_stands_before_what_grew_by_it(project: Path) -> None:
    (project / "train.py").write_text(BROKEN["no sampler"][0])
    code, found = report("train.py", cwd=project)
    assert code == 1
    assert [one["code"] for one in found["findings"] if one["severity"] == "error"] == ["DDP101", "DDP901"]


def test_a_hang_is_red_and_cannot_be_agreed_on(project: Path) -> None:
    (project / "train.py").write_text(BROKEN["hang"][0])
    before = (project / "ddpdoctor-baseline.json").read_bytes()
    code, found = report("train.py", "--update", cwd=project)
    assert code == 1
    assert "DDP301" in [finding["code"] for finding in found["findings"]]
    assert "nothing was written" in found["gate"]["notes"][0]
    assert (project / "ddpdoctor-baseline.json").read_bytes() == before


def test_what_is_missing_is_said_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HEALTHY)
    done = gate("train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no baseline ddpdoctor-baseline.json" in done.stderr
    assert "--update" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_baseline_of_another_command_line_is_not_taken(project: Path) -> None:
    done = gate("train.py", "--", "--lr", "1", cwd=project)
    assert (done.returncode, done.stdout) == (2, "")
    assert "has no entry for `train.py --lr 1`, only for `train.py`" in done.stderr


def test_a_script_that_cannot_be_rehearsed_is_inconclusive_and_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nimport torch.distributed\nsys.exit('needs --data DIR')\n")
    code, found = report("train.py", "--update", cwd=tmp_path)
    assert (code, found["verdict"]) == (3, "inconclusive")
    assert found["rehearsal"]["hint"]
    assert not (tmp_path / "ddpdoctor-baseline.json").exists()


@pytest.mark.timeout(900)
def test_a_baseline_asks_whether_the_ranks_train_what_one_process_would(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CORRECT[0].text(), encoding="utf-8")
    chosen = ("--select", "DDP223", "train.py")
    assert report("--update", "--equivalence", *chosen, cwd=tmp_path)[0] == 0
    (tmp_path / "train.py").write_text(FAULTS[0].text(), encoding="utf-8")
    code, said = report(*chosen, cwd=tmp_path)
    assert code == 1
    assert [finding["code"] for finding in said["findings"]] == ["DDP223"]
    assert said["equivalence"]["factor"] == 2.0
