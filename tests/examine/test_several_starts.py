"""Scripts that start their ranks several times, one set after the other, as the tutorial of DDP does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.check_command import check

STARTS = """
import os
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def join(rank, ranks):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "29533"
    dist.init_process_group("gloo", rank=rank, world_size=ranks)


def train(model):
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(8, 4)).mean().backward()
    optimizer.step()


def basic(rank, ranks):
    join(rank, ranks)
    train(torch.nn.Linear(4, 2))
    dist.destroy_process_group()


def checkpoint(rank, ranks):
    join(rank, ranks)
    model = torch.nn.Linear(4, 2)
    if rank == 0:
        torch.save(model.state_dict(), "model.pt")
    dist.barrier()
    model.load_state_dict(torch.load("model.pt"))
    train(model)
    dist.barrier()
    if rank == 0:
        os.remove("model.pt")
    dist.destroy_process_group()


def other_model(rank, ranks):
    join(rank, ranks)
    train(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)))
    LAST
    dist.destroy_process_group()


if __name__ == "__main__":
    for demo, ranks in ((basic, 3), (checkpoint, 3), (other_model, 2)):
        mp.spawn(demo, args=(ranks,), nprocs=ranks)
"""


def examined(directory: Path, text: str, *options: str) -> tuple[int, dict[str, Any]]:
    (directory / "train.py").write_text(text)
    return check("--time-limit", "240", *options, "train.py", cwd=directory)


def test_each_set_of_ranks_is_judged_by_itself(tmp_path: Path) -> None:
    code, report = examined(tmp_path, STARTS.replace("LAST", "pass"))
    rehearsal = report["rehearsal"]
    # Not judged together: the ranks 0 and 1 hold another model than rank 2 had, and their barriers are counted anew.
    assert (code, rehearsal["status"], rehearsal["steps"]) == (0, "completed", 3), report["findings"]
    assert rehearsal["unreached"] == []


def test_what_an_earlier_set_does_wrong_is_found(tmp_path: Path) -> None:
    text = STARTS.replace("    dist.barrier()\n    model.load", "    model.load").replace(
        "    model.load", "    import time; time.sleep(5 * (rank > 0)); model.load"
    )
    _, report = examined(tmp_path, text.replace("LAST", "pass"))
    (finding,) = (one for one in report["findings"] if one["code"] == "DDP603")
    assert "rehearsal" in finding["basis"] and report["rehearsal"]["steps"] == 3, report["rehearsal"]


def test_a_hang_of_the_last_set_is_proved(tmp_path: Path) -> None:
    code, report = examined(tmp_path, STARTS.replace("LAST", "dist.barrier() if rank == 0 else None"))
    rehearsal = report["rehearsal"]
    assert (code, rehearsal["status"]) == (1, "stopped"), rehearsal
    (finding,) = (one for one in report["findings"] if one["severity"] == "error")
    assert (finding["code"], finding["title"][:27]) == ("DDP301", "only rank 0 reaches barrier")
    assert finding["evidence"][0]["text"].startswith("rank 1 ran to its end and left while rank 0 waits in barrier")


def test_a_script_that_asks_for_four_gpus_gets_them(tmp_path: Path) -> None:
    counts = "if torch.cuda.device_count() < 4:\n        sys.exit('Requires at least 4 GPUs.')\n    for demo"
    text = STARTS.replace("for demo", counts, 1).replace("LAST", "pass")
    _, report = examined(tmp_path, text, "--device", "stand-in")
    rehearsal = report["rehearsal"]
    assert (rehearsal["status"], rehearsal["steps"]) == ("completed", 3), rehearsal
    assert any(note.endswith("rehearsed again with the 4 GPUs of the job's node") for note in rehearsal["notes"])
