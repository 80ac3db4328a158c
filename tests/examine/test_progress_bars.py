"""Rank 0 alone wraps its loader in a progress bar in every epoch: its passes are as long as those of the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.check_command import check

SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(64, 4)
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))
for epoch in range(6):
    BAR
    total = torch.zeros(())
    for number, batch in enumerate(bar):
        optimizer.zero_grad()
        loss = model(batch).mean()
        loss.backward()
        optimizer.step()
        total += loss.detach()
        LAST
            dist.all_reduce(total)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("bar", "last"),
    [
        ("bar = loader = tqdm(loader) if dist.get_rank() == 0 else loader", "if number == len(bar) - 1:"),
        ("bar = tqdm(loader) if dist.get_rank() == 0 else loader", "if number == len(bar) - 1:"),
        ("bar = loader = tqdm(loader) if dist.get_rank() == 0 else loader", "if False:"),
    ],
)
def test_a_progress_bar_of_rank_0_makes_its_passes_no_longer(bar: str, last: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("BAR", bar).replace("LAST", last))
    _, report = check("--time-limit", "240", "--no-equivalence", "train.py", cwd=tmp_path)
    assert report["rehearsal"]["status"] == "completed", report["rehearsal"]
    assert [one["title"] for one in report["findings"] if one["severity"] == "error"] == []
