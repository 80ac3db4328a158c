"""A job on two ranks, of which one calls a collective that the other never comes to."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(60):
    optimizer.zero_grad()
    model(torch.randn(32, 256)).sum().backward()
    optimizer.step()
    if step == 40 and dist.get_rank() == 1:
        dist.all_reduce(torch.zeros(1))
