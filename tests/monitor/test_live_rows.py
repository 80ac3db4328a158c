"""What ``profile`` finds in a job beside its speed: one script with several defects, and its correct twin."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from ddpdoctor.checks.gradients import needless_find_unused_parameters
from ddpdoctor.finding import Finding
from ddpdoctor.record.model import Job, Rank, RunRecord, TensorInfo, Wrap
from ddpdoctor.record.streams.training import UnusedSearch

BROKEN = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 16), nn.Linear(16, 1))
        self.register_buffer("table", torch.zeros(500_000))

def train(model, optimizer, loader, left_out=-1):
    for number, (inputs, targets) in enumerate(loader):
        if number == left_out:
            continue
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()

def main(folder):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(512, 8), torch.randn(512, 1))
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler = None
    whole = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(12):
        train(model, optimizer, whole, 5 if epoch == 3 + 2 * rank else -1)
    torch.save(model.state_dict(), f"{folder}/model.pt")
    later = DataLoader(data, batch_size=32, sampler=DistributedSampler(data) if sampler else None)
    train(model, optimizer, later)
    part = range(100, 164) if rank else range(80)
    train(model, optimizer, DataLoader(Subset(data, part), batch_size=16))
    dist.destroy_process_group()

main(sys.argv[1])
"""
REPAIRS = {
    ", find_unused_parameters=True": "",
    'self.register_buffer("table", torch.zeros(500_000))': "self.table = torch.zeros(500_000)",
    "sampler = None": "sampler = DistributedSampler(data)",
    "range(12):": "range(12):\n        sampler.set_epoch(epoch)",
    "    torch.save(": "    if rank == 0:\n        torch.save(",
    "range(80)": "range(64)",
    "3 + 2 * rank": "3",
}
CODES = {"DDP101", "DDP103", "DDP202", "DDP203", "DDP312", "DDP601"}


def _findings(directory: Path, script: str) -> dict[str, list[dict[str, Any]]]:
    """What was found, by code."""
    file = directory / "train.py"
    file.write_text(script)
    command = (sys.executable, "-m", "ddpdoctor", "profile", "--no-tui", "--output-format", "json")
    done = subprocess.run(
        (*command, "--run-dir", str(directory / "run"), str(file), str(directory)), capture_output=True, check=False
    )
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in json.loads(done.stdout)["findings"]:
        found.setdefault(finding["code"], []).append(finding)
    return found


def test_each_defect_of_a_watched_job_is_found(tmp_path: Path) -> None:
    found = _findings(tmp_path, BROKEN)
    assert found.keys() >= CODES
    assert "DDP306" not in found  # One rank has left because its pass was shorter.
    first, later = sorted(found["DDP101"], key=lambda finding: int(finding["locations"][0]["line"]))
    assert first["title"].startswith("ranks 0 and 1 train on the same samples: they each draw 512 of 512")
    assert [BROKEN.splitlines()[one["locations"][0]["line"] - 1].split()[0] for one in (first, later)] == [
        "whole",
        "later",
    ]
    ((uneven,), (needless,), (wasted,), (saved,)) = (found[code] for code in ("DDP103", "DDP202", "DDP203", "DDP601"))
    assert "rank 1 gets 4 batches, rank 0 gets 5 batches; then " in uneven["title"]
    assert "measured steps every parameter of Net got a gradient on every rank" in needless["title"]
    assert "2.0 MB of buffers of Net" in wasted["title"]
    assert saved["ranks"] == [0, 1]
    (drifted,) = found["DDP312"]
    assert drifted["severity"] == "warning"
    told = "in a pass of 32 batches for each rank 1 averaged gradients 32 times, rank 0 31: from there on, gradients of"
    assert drifted["title"].startswith(told)
    assert BROKEN.splitlines()[drifted["locations"][0]["line"] - 1].startswith("    for number")


def test_nothing_is_said_of_the_correct_twin(tmp_path: Path) -> None:
    script = BROKEN
    for defect, repair in REPAIRS.items():
        assert defect in script
        script = script.replace(defect, repair)
    assert not _findings(tmp_path, script).keys() & (CODES | {"DDP306"})


def _searching(*searches: UnusedSearch, **options: bool) -> list[Finding]:
    wrap = Wrap(
        rank=0,
        wrap=0,
        options={"find_unused_parameters": True, **options},
        parameters=(TensorInfo(name="weight", requires_grad=True),),
    )
    record = RunRecord(
        job=Job(kind="run", world_size=2),
        ranks=(Rank(rank=0), Rank(rank=1)),
        wraps=(wrap, msgspec.structs.replace(wrap, rank=1)),
        unused_searches=searches,
    )
    return [found for found in needless_find_unused_parameters.in_run(record) if isinstance(found, Finding)]


def _search(rank: int, looks: int, *, found_unused: bool = False) -> UnusedSearch:
    return UnusedSearch(rank=rank, wrap=0, looks=looks, found_unused=found_unused)


def test_a_search_is_needless_once_all_ranks_saw_enough_steps_without_an_unused_parameter() -> None:
    (finding,) = _searching(_search(0, 20), _search(0, 40), _search(1, 20))
    assert "in 20 measured steps" in finding.title
    assert _searching(_search(0, 20), _search(1, 19)) == []
    assert _searching(_search(0, 20)) == []
    assert _searching(_search(0, 20), _search(1, 20), _search(1, 31, found_unused=True)) == []
    assert _searching(_search(0, 20), _search(1, 20), static_graph=True) == []
