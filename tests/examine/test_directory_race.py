"""Ranks that race to make a directory: the failure is proved, and another rehearsal shows what comes behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.check_command import check

TRAINING = """
import os
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

MAKES
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.randn(8, 4)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
(Path("runs") / f"{dist.get_rank()}.txt").write_text("done")
dist.destroy_process_group()
"""


def examined(directory: Path, makes: str) -> dict[str, Any]:
    (directory / "train.py").write_text(TRAINING.replace("MAKES", makes))
    return check("--time-limit", "240", "train.py", cwd=directory)[1]


def proved(report: dict[str, Any]) -> list[tuple[str, str, int]]:
    return [
        (finding["severity"], finding["code"], finding["locations"][0]["line"])
        for finding in report["findings"]
        if "rehearsal" in finding["basis"]
    ]


@pytest.mark.parametrize("makes", ['os.makedirs("runs")', 'Path("runs").mkdir()'])
def test_the_race_is_an_error_and_the_training_behind_it_is_rehearsed(makes: str, tmp_path: Path) -> None:
    report = examined(tmp_path, makes)
    rehearsal = report["rehearsal"]
    assert (rehearsal["status"], rehearsal["steps"]) == ("completed", 3), rehearsal
    assert proved(report) == [("error", "DDP608", 8)]
    assert "had made runs; rehearsed again" in rehearsal["notes"][-1]
    assert not (tmp_path / "runs").exists()


def test_a_directory_that_was_there_before_still_ends_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "kept.txt").write_text("of the user")
    report = examined(tmp_path, 'os.mkdir("runs")')
    assert report["rehearsal"]["status"] == "failed"
    assert "rehearsed again" not in " ".join(report["rehearsal"]["notes"])
    assert (tmp_path / "runs" / "kept.txt").read_text() == "of the user"


def test_a_rank_that_makes_its_directory_twice_fails_in_both(tmp_path: Path) -> None:
    report = examined(tmp_path, 'os.mkdir("runs")\nos.mkdir(f"runs/{os.environ[\'RANK\']}")\n' * 2)
    rehearsal = report["rehearsal"]
    assert rehearsal["status"] == "failed", rehearsal
    assert "train.py:10" in rehearsal["reason"]
    assert ("error", "DDP608", 8) in proved(report)
