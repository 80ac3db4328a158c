"""What a cut leads to is never the script's fault, and without cuts a rehearsal computes what the job would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ddpdoctor.examine.rehearsal_result import judge
from ddpdoctor.probe.free_port import free_port

from .conftest import HEAD, Rehearse

SETTING = """
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


def test_a_failure_right_after_a_cut_pass_is_not_blamed_on_the_rank(rehearse_script: Rehearse) -> None:
    record = rehearse_script(
        SETTING
        + """
data = TensorDataset(torch.randn(400, 4), torch.arange(400) % 3)
for epoch in range(3):
    for x, y in DataLoader(data, batch_size=2, sampler=DistributedSampler(data)):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    if rank == 0:
        right = [model.module(x).argmax(1) for x, y in DataLoader(data, batch_size=10)]
        accuracy = (torch.cat(right) == data.tensors[1]).float().mean()
    dist.barrier()
"""
    )
    assert not record.ranks[0].exceptions
    section = judge(record, os.path.dirname(record.job.script))
    assert (section.status, section.steps) == ("stopped", 4)
    assert section.reason.startswith("rank 0 raised RuntimeError at train.py:22: The size of tensor a (40) must match")
    assert section.reason.endswith("which may be the cause")
    assert "--full" in section.hint


def test_an_unfit_machine_is_told_before_the_model_is_wrapped(rehearse_script: Rehearse) -> None:
    record = rehearse_script(
        """
        dist.init_process_group("gloo")
        vast = nn.Module()
        vast.weight = nn.Parameter(torch.zeros(1).expand(10**13))
        DDP(vast)
        """
    )
    assert (record.job.stop_reason, record.wraps) == ("memory", ())
    assert record.job.stop_text.startswith("the model has 10,000,000,000,000 parameters: 2 ranks need 320,000.0 GB")


def test_slow_steps_end_in_time_and_smaller_batches_are_fetched(rehearse_script: Rehearse) -> None:
    record = rehearse_script(
        SETTING
        + """
data = TensorDataset(torch.randn(4000, 4))
for (x,) in DataLoader(data, batch_size=20, sampler=DistributedSampler(data), num_workers=1):
    print("samples", len(x), flush=True)
    out = model(x).sum()
    time.sleep(4)
    out.backward()
    optimizer.step()
""",
        batches=100,
        time_limit_s=120.0,
        batch_size=2,
    )
    assert record.job.stop_reason == "slow", record.job.stop_text
    assert "do not fit into the time limit of 120 s" in record.job.stop_text
    assert record.steps() == 2, "the first step imports and compiles, the second says what one takes"
    assert "samples 2\n" in record.ranks[0].output_tail
    assert [entry.true_length for entry in record.passes] == [100, 100], "the loader itself is what it was"


FULL = (
    SETTING
    + """
class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return torch.full((4,), float(index)) + torch.randn(4), index % 3

sampler = DistributedSampler(Noisy())
loader = DataLoader(Noisy(), batch_size=2, sampler=sampler, num_workers=1)
drawn = 0
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        drawn += len(x)
for _ in range(10):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
if rank == 0:
    print("weights", drawn, [value.hex() for value in model.module.weight.flatten().tolist()], flush=True)
dist.barrier()
"""
)


def test_a_full_rehearsal_trains_what_the_job_would(rehearse_script: Rehearse, tmp_path: Path) -> None:
    record = rehearse_script(FULL, full=True)
    assert [rank.end for rank in record.ranks] == ["finished", "finished"]
    assert record.steps() == 40
    assert {entry.end for entry in record.passes} == {"exhausted"}
    script = tmp_path / "plain.py"
    script.write_text(HEAD + FULL)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    plain = subprocess.run(
        [*launcher, str(script)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    weights = next(line for line in plain.stdout.splitlines() if line.startswith("weights 60 "))
    assert weights in record.ranks[0].output_tail.splitlines()
