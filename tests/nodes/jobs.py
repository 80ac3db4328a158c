"""The jobs of the truth table: one script, and what one rank of it does otherwise."""

from __future__ import annotations

SCRIPT = """
import os, signal, sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

fault, steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
wide = 1024 if fault == "comm-bound" else 64
model = DDP(torch.nn.Sequential(*(torch.nn.Linear(wide, wide) for _ in range(4))))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 16 * steps

    def __getitem__(self, index):
        if fault == "input-bound" and rank >= 2:
            time.sleep(0.004)
        return torch.ones(wide)


for step, inputs in enumerate(torch.utils.data.DataLoader(Samples(), batch_size=16)):
    optimizer.zero_grad()
    loss = model(inputs).sum()
    time.sleep(0.002 if fault == "comm-bound" else 0.03)
    if rank == 3 and fault == "straggler":
        time.sleep(0.02)
    if rank == 3 and step == steps // 2 and fault == "hang":
        time.sleep(1_000)
    if rank == 3 and step == steps // 2 and fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""
