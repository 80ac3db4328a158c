"""One model trained by the strategy that the first argument names; the second argument changes something."""
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, 10)
        self.up = nn.Linear(10, 12)
        self.down = nn.Linear(12, 10)
        self.head = nn.Linear(10, 3)

    def forward(self, x):
        x = self.enter(x)
        return self.head(x + self.down(F.gelu(self.up(x))))


def main(strategy, change):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    data = TensorDataset(torch.randn(96, 6), torch.randint(-1, 3, (96,)))
    sampler = None if strategy == "tensor" else DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=8 if strategy == "tensor" else 4, sampler=sampler)
    model = Net()
    if strategy == "ddp":
        model = DDP(model)
    elif strategy == "tensor":
        mesh = init_device_mesh("cpu", (world,))
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    else:
        fully_shard(model.up)
        fully_shard(model)
        for module in {"sums": (model.up, model), "sums-up": (model.up,)}.get(change, ()):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y, ignore_index=-1, reduction="sum")
        count = (y != -1).sum().float()
        if change == "own-counts":
            loss = loss / count
        elif strategy == "tensor":
            loss = loss / count
        else:
            dist.all_reduce(count)
            loss = loss * world / count
        if change == "longer":
            loss = loss * 1.5
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


main(*sys.argv[1:3])
