"""A script that does not start on two ranks is rehearsed on those that its command starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.examination import RehearsalSection
from ddpdoctor.examine.another_try import another_try
from ddpdoctor.launch.request import Launch, RehearsalRequest
from ddpdoctor.record.model import Job, RankException, RunRecord
from tests.check_command import check

MESH = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_a_mesh_of_four_is_rehearsed_on_four(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MESH)
    code, report = check("--", "torchrun", "--nproc-per-node", "4", "train.py", cwd=tmp_path)
    assert (code, report["rehearsal"]["ranks"], report["rehearsal"]["status"]) == (0, 4, "completed")
    assert any(note.endswith("rehearsed again on the 4 of the command") for note in report["rehearsal"]["notes"])


@pytest.mark.parametrize(
    ("raised", "said", "ranks", "then"),
    [
        ("Mesh should not be bigger than default world size 2, but found 4 ranks!", "", 4, 4),
        ("World size 2 needs to be divisible by TP size 4", "", 8, 8),
        ("    assert world_size % args.tensor_parallel == 0", "", 4, 4),
        ("", "Unable to locate sufficient 4 gpus to run this example. Exiting.", 4, 4),
        ("", "usage: train.py [-h] --data DATA", 4, 2),
        ("too many values to unpack (expected 2)", "", 4, 2),
        ("Mesh should not be bigger than default world size 2, but found 64 ranks!", "", 64, 2),
        ("Mesh should not be bigger than default world size 2, but found 4 ranks!", "", 2, 2),
    ],
)
def test_only_who_speaks_of_ranks_gets_more(raised: str, said: str, ranks: int, then: int, tmp_path: Path) -> None:
    request = RehearsalRequest(
        script=tmp_path / "train.py", launch=Launch(ranks=ranks), pretend=False, device="stand-in"
    )
    errors = (RankException(time_ns=1, type="RuntimeError", message=raised, traceback=raised),) if raised else ()
    record = RunRecord(job=Job(kind="rehearsal", device="stand-in", early_exceptions=errors))
    again = another_try(request, record, RehearsalSection(status="failed", reason="it failed", output=said))
    assert (2 if again is None else again.request.nproc) == then
