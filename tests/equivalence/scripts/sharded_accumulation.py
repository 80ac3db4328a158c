"""A regression on a sharded model that adds up the gradients of some passes, and reduces them with the last."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

STEPS = 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 13), nn.Tanh())
        self.head = nn.Linear(13, 3)
        self.register_buffer("scale", torch.rand(6) + 0.5)

    def forward(self, x):
        return self.head(self.body(x * self.scale))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    data = TensorDataset(torch.randn(96, 6), torch.randn(96, 3))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    model = Net()
    fully_shard(model.body)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, (x, y) in enumerate(loader):
        last = number % STEPS == STEPS - 1
        model.set_requires_gradient_sync(last)
        loss = F.mse_loss(model(x), y) / STEPS
        loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


main()
