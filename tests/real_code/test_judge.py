"""The judging of findings on public scripts, on a repository made here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.real_code.corpus import Defect, Labelled, Missing, Verdict, as_json, lay_out, read_labels
from tests.real_code.judge import clean, missed, precision, read_all, recall

SCRIPT = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    dist.barrier()
torch.save({}, "every.pt")
dist.destroy_process_group()
"""


@pytest.fixture
def mirror(tmp_path: Path) -> tuple[Path, str]:
    work = tmp_path / "mirror" / "owner+name" / "repo"
    work.mkdir(parents=True)
    (work / "train.py").write_text(SCRIPT)
    (work / "broken.py").write_text("def f(:\n")
    (work / "clean.py").write_text("import torch\n")
    git = ["git", "-C", str(work), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    done = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return tmp_path / "mirror", done.stdout.strip()


def labelled(commit: str, path: str, **more: object) -> Labelled:
    return Labelled(repo="owner/name", commit=commit, path=path, **more)  # type: ignore[arg-type]


def test_findings_are_judged_by_labels_and_verdicts(mirror: tuple[Path, str], tmp_path: Path) -> None:
    place, commit = mirror
    found = Defect(("DDP301",), (6,), title="barrier")
    hidden = Defect(("DDP102",), (3,), "likely", title="epoch")
    train = labelled(commit, "train.py", defects=(found, hidden))
    scripts = [train, labelled(commit, "broken.py"), labelled(commit, "clean.py", clean=True)]
    readings = read_all(scripts, place, tmp_path / "trees", jobs=1)
    assert [bool(reading.failure) for reading in readings] == [False, True, False]
    assert {said.code for said in readings[0].said if said.loud} == {"DDP301", "DDP601"}
    assert str(precision(readings, ("error",))) == "100.0 % (1 of 1)"
    assert precision(readings, ("error", "warning")).part == 1  # Nobody has read the save.
    assert recall(readings, ("certain",)).part == 1 and recall(readings, ("likely",)).part == 0
    assert [defect for _, defect in missed(readings)] == [hidden]
    assert str(clean(readings)) == "100.0 % (1 of 1)"

    verdicts = (Verdict("DDP601", 7, True, "every rank"), Verdict("DDP301", 6, False, "as if"))
    judged = labelled(commit, "train.py", verdicts=verdicts)
    readings = read_all([judged], place, tmp_path / "trees", jobs=1)
    assert [readings[0].judgement(said) for said in readings[0].said if said.loud] == ["wrong", "right"]


def test_a_repository_that_the_mirror_lacks_is_said(mirror: tuple[Path, str], tmp_path: Path) -> None:
    place, _ = mirror
    with pytest.raises(Missing, match="owner/name is not in the mirror at 0000"):
        lay_out(place, "owner/name", "0" * 40, tmp_path / "tree")
    absent = Labelled(repo="nobody/nothing", commit="0" * 40, path="train.py")
    [reading] = read_all([absent], place, tmp_path / "trees", jobs=1)
    assert reading.failure == "nobody/nothing is not in the mirror"


def test_the_labels_are_kept_as_they_are_written() -> None:
    scripts = read_labels()
    assert as_json(scripts) == (Path(__file__).with_name("labels.json")).read_text(encoding="utf-8")
    assert len(scripts) >= 120 and len({script.repo for script in scripts}) >= 60
    assert all(len(script.commit) == 40 for script in scripts)
