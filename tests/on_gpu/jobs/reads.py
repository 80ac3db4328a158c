"""Reads results back from the GPU in 20 lines of every step; reads.py OUT STEPS. Each such line ends in ``# read``.

On the CPU a read waits for nothing, so there the probe is made to take each for one that does.
"""

import importlib
import sys
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.on_gpu.jobs.rank import device_ids, join, leave

OUT, STEPS = sys.argv[1], int(sys.argv[2])


def take_for_gpu() -> None:
    """Have the probe, where there is one, take the CPU for a GPU."""
    if "_ddpdoctor" not in sys.modules:
        return
    reductions = importlib.import_module("_ddpdoctor.probe.live.reductions").Reductions
    known = reductions.meet

    def meet(this: Any, ddp: Any) -> Any:
        reducer = known(this, ddp)
        reducer.on_gpu = True
        return reducer

    reductions.meet = meet
    importlib.import_module("_ddpdoctor.probe.live.hooks").HostReads.waits_for_gpu = lambda *_: True


def main() -> None:
    device = join()
    if device.type == "cpu":
        take_for_gpu()
    model = DistributedDataParallel(nn.Linear(64, 64).to(device), device_ids=device_ids(device))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    total = 0.0
    history: list[object] = []
    for _ in DataLoader(range(STEPS), batch_size=None):
        history.clear()
        outputs = model(torch.ones(8, 64, device=device))
        loss = outputs.square().mean()
        total += loss.item()  # read
        history.append(loss.detach().cpu())  # read
        with redirect_stdout(StringIO()):
            print(loss)  # read
            print("loss", loss.detach())  # read
            print(f"loss {loss:.4f}")  # read
        history.append(str(loss))  # read
        history.append(repr(outputs[0, :2]))  # read
        if loss > 1e9:  # read
            break
        while not torch.isfinite(loss):  # read
            break
        history.append(float(loss))  # read
        history.append(int(loss))  # read
        history.append(bool(loss))  # read
        history.append(outputs[0].tolist())  # read
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        history.append(norm.item())  # read
        history.append(round(norm.detach().cpu().item(), 3))  # read
        optimizer.step()
        history.append([value.item() for value in outputs.mean(0)[:2]])  # read
        history.append({"accuracy": (outputs.argmax(1) == 0).float().mean().item()})  # read
        history.append(max(outputs[0, 0].item(), 0.0))  # read
        assert not torch.isnan(outputs).any()  # read
        history.append("%.3f" % loss)  # read # noqa: UP031
    leave(OUT, total=total)


main()
