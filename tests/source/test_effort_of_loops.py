"""Long scripts: what is walked for good is not passed over for walks that were taken back with their loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.source.interpreter import memory
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script.script import read_script
from tests.source.marked import written

_HEAD = """
import argparse, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
"""
_FOLDS = """
def work(rank, fold, options):
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = DDP(nn.Linear(4, 4))
    best = 0
    for epoch in range(10):
        model(torch.randn(8, 4)).sum().backward()
        best = best + 1 if best else options.first
    torch.save(model.state_dict(), "model.pt")

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=1)
    options = parser.parse_args()
    options.world = 1
    for fold in range(5):
        options.world = 2 * options.world
        mp.spawn(work, nprocs=2, args=(fold, options))
        options.world = 1 if fold else options.first
"""
_LAST = """
def save(model, name, last=False):
    if last:
        torch.save(model.state_dict(), f"{name}.pt")
    elif name % 10 == 3:
        torch.save(model.state_dict(), "now.pt")

dist.init_process_group("gloo")
model, best = DDP(nn.Linear(4, 4)), 0
for epoch in range(10):
    model(torch.randn(8, 4)).sum().backward()
    best = best + 1 if best else epoch
    if dist.get_rank() == 0:
        save(model, epoch)
save(model, "last", last=True)
"""


@pytest.mark.parametrize(("course", "saved"), [(_FOLDS, "model.pt"), (_LAST, "last")], ids=["folds", "flag"])
def test_a_long_script_is_followed_to_its_end(
    course: str, saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "MAXIMUM_STEPS", 60)
    projection = whole_projection(read_script(written(tmp_path, course, head=_HEAD)))
    places = [(event.module.excerpt(event.node, 80), event.ranks) for event in projection.of_kind("save")]
    assert any(saved in text or ranks == 0b1111 for text, ranks in places), places
