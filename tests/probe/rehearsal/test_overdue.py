"""What comes after the rehearsed passes and reaches no hook of ours is ended after a while, and counts as rehearsed."""

from __future__ import annotations

import time

from tests.probe.rehearsal.conftest import Rehearse

BODY = """
dist.init_process_group("gloo")
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(64, 4))
sampler = DistributedSampler(data)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for (batch,) in DataLoader(data, batch_size=4, sampler=sampler):
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if epoch == 1 and dist.get_rank() == 0:
        until = time.monotonic() + 1000
        while time.monotonic() < until:
            sum(range(1000))
dist.barrier()
"""


def test_work_without_a_hook_after_what_was_rehearsed_is_ended(rehearse_script: Rehearse) -> None:
    began = time.monotonic()
    record = rehearse_script(BODY)
    assert record.job.stop_reason == "" and record.steps() >= 8, record.job.stop_text
    assert [rank.end for rank in record.ranks] == ["ended-by-rehearsal"] * 2
    assert time.monotonic() - began < 200
