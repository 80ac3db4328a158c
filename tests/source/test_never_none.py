"""What a call of Python or a progress bar gives is an object on every rank: no rank is told apart by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.source.marked import HEAD, places, written

TRAINING = """
dist.init_process_group("gloo")
rank = dist.get_rank()

def shown(loader):
    if rank == 0:
        return tqdm(loader)
    return loader

def train(loader, held_out=None):
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        if held_out is not None:
            {change}
            validate(held_out)

@torch.no_grad()
def validate(held_out):
    total = torch.tensor(0.0)
    for (x,) in held_out:
        total += model(x).sum()
    dist.all_reduce(total)

data = TensorDataset(torch.randn(64, 4))
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
train(loader, DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False)))
dist.destroy_process_group()
"""
CHANGES = (
    "held_out = tqdm(held_out) if rank == 0 else held_out",
    "held_out = shown(held_out)",
    "if rank == 0: held_out = tqdm(held_out, desc='held out')",
    "if rank == 0: held_out = list(held_out)",
    "if rank == 0: held_out = iter(held_out)",
    "if rank == 0: held_out = enumerate(held_out)",
)


@pytest.mark.parametrize("change", CHANGES)
def test_what_one_rank_wraps_is_there_on_all(tmp_path: Path, change: str) -> None:
    head = f"{HEAD}from tqdm import tqdm\n"
    assert places(written(tmp_path, TRAINING.replace("{change}", change), head=head)) == []


def test_what_one_rank_sets_to_none_is_not(tmp_path: Path) -> None:
    head = f"{HEAD}from tqdm import tqdm\n"
    found = places(
        written(tmp_path, TRAINING.replace("{change}", "held_out = held_out if rank == 0 else None"), head=head)
    )
    assert "DDP301" in {code for code, _ in found}
