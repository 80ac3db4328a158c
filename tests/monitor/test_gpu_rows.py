"""What ranks tell of a model on a GPU, by ranks on the CPU that take it for one."""

from __future__ import annotations

from pathlib import Path

from tests.monitor.watched import finished

SCRIPT = """
from _ddpdoctor.probe.live.hooks import HostReads
from _ddpdoctor.probe.live.reductions import Reductions

def meet(reductions, ddp, known=Reductions.meet):
    reducer = known(reductions, ddp)
    reducer.on_gpu = True
    return reducer

Reductions.meet = meet
HostReads.waits_for_gpu = lambda *_: True

data = TensorDataset(torch.randn(480, 500), torch.randn(480, 1))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
model = DDP(nn.Sequential(nn.Linear(500, 2000), nn.ReLU(), nn.Linear(2000, 1)))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
total = 0.0
for number, (inputs, targets) in enumerate(loader):
    loss = nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.step()
    total += loss.item()
    if number % 5 == 0:
        print(loss)
assert "item" not in torch.Tensor.__dict__ and "__bool__" not in torch.Tensor.__dict__
os._exit(0)
"""


def test_ranks_tell_which_lines_read_in_every_step(tmp_path: Path) -> None:
    record = finished(tmp_path, SCRIPT)
    lines = (tmp_path / "train.py").read_text().splitlines()
    reads = {
        (read.rank, read.method, lines[frame.line - 1].strip()): (read.calls, read.steps_with, read.steps)
        for read in record.host_reads
        if (frame := record.site(read.site).innermost) is not None
    }
    for rank in (0, 1):
        assert reads[rank, "item", "total += loss.item()"] == (20, 20, 20)
        assert {steps for (of, _, line), (_, steps, _) in reads.items() if (of, line) == (rank, "print(loss)")} == {4}
    assert {line for _, _, line in reads} == {"total += loss.item()", "print(loss)"}
