"""A script that looks whether its directory of data is there is rehearsed again with an empty one, where that helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.examination import RehearsalSection
from ddpdoctor.examine.another_try import another_try
from ddpdoctor.launch.request import RehearsalRequest
from ddpdoctor.probe.journal import Journal
from ddpdoctor.probe.rehearsal.pretend.providers import Pretence
from ddpdoctor.record.model import Job, Rank, RankException, RunRecord
from tests.check_command import check

ASKS_FIRST = """
import argparse
from pathlib import Path
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path)
root = parser.parse_args().data
dist.init_process_group("gloo")
assert root.is_dir(), f"the data path {root} does not exist"
READS
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    model(torch.from_numpy(tokens[:8].astype(np.float32))[None]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "reads", ['np.memmap(root / "train.bin", dtype=np.uint16, mode="r")', "np.array(sorted(root.iterdir())[0])"]
)
def test_a_script_that_asks_for_its_directory_of_data_first_gets_an_empty_one(reads: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ASKS_FIRST.replace("READS", f"tokens = {reads}"))
    absent = str(tmp_path / "none" / ("longer-than-a-line-" * 4) / "corpus")
    code, report = check("--time-limit", "240", "train.py", "--", f"--data={absent}", cwd=tmp_path)
    rehearsal = report["rehearsal"]
    (note,) = (note for note in rehearsal["notes"] if "rehearsed again" in note)
    assert note.startswith(f"{absent} does not exist; rehearsed again with an empty directory in its place")
    if "memmap" in reads:
        assert (rehearsal["status"], rehearsal["steps"]) == ("completed", 2), rehearsal
        assert f"pretended: the directory {absent} (empty)" in rehearsal["notes"]
    else:
        assert (code, rehearsal["status"], report["findings"]) == (3, "failed", [])
        assert absent[:60] in rehearsal["reason"] and "lacks the data" in rehearsal["hint"]
        assert ", which does not work for this script: rank" in note and "IndexError" in note
    assert not Path(absent).exists()


@pytest.mark.parametrize(
    ("argument", "message", "overlay", "made"),
    [
        ("--data=/no/coco", "provided path /no/coco does not exist", True, "/no/coco"),
        ("/no/coco/", "the directory '/no/coco' was not found.", True, "/no/coco"),
        ("/no/coco", "provided path /no/coco does not exist", False, ""),
        ("/no/coco", "provided path /no/coco/train does not exist", True, ""),
        ("/no/coco", "[Errno 2] No such file or directory: '/no/coco'", True, ""),
        ("/no/list.txt", "the file /no/list.txt does not exist", True, ""),
        ("/", "the directory / does not exist", True, ""),
    ],
)
def test_only_a_directory_that_an_argument_names_is_made_and_only_in_an_overlay(
    argument: str, message: str, overlay: bool, made: str
) -> None:
    raised = RankException(time_ns=1, type="AssertionError", message=message, traceback="")
    job = Job(kind="rehearsal", overlay=overlay)
    record = RunRecord(job=job, ranks=(Rank(rank=0, end="raised", exceptions=(raised,)),))
    request = RehearsalRequest(script=Path("t.py"), arguments=(argument,))
    found = another_try(request, record, RehearsalSection(status="failed", reason=message))
    assert (found.request.absent_directories if found else ()) == ((made,) if made else ())
    again = found and another_try(found.request, record, RehearsalSection(status="failed", reason=""))
    assert again is None or again.request.absent_directories == (made,)


@pytest.mark.parametrize(("mount_points", "made"), [(None, False), ({}, True)])
def test_the_empty_directory_is_made_only_where_an_overlay_throws_it_away(
    tmp_path: Path, mount_points: dict[str, bool] | None, made: bool
) -> None:
    wanted = tmp_path / "data" / "train"
    plan = {"absent_directories": [str(wanted)], "mount_points": mount_points}
    Pretence(Journal(str(tmp_path), plan)).make_directories()
    assert wanted.is_dir() is made
