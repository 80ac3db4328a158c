import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def batch_of(step, rank):
    if step == 3 and rank == 1:
        raise ValueError("sample 17 is broken")
    return torch.randn(4, 8)


def train(model, optimizer, rank):
    for step in range(6):
        x = batch_of(step, rank)
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()


dist.init_process_group("gloo")
model = DDP(nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    train(model, optimizer, dist.get_rank())
except Exception as error:
    print("failed", error)
    dist.barrier()
dist.destroy_process_group()
