"""A small convolutional classifier."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
        self.head = nn.Linear(8, 5)
        self.aux = nn.Linear(8, 5)

    def forward(self, x):
        x = self.features(x).mean((2, 3))
        return self.head(x), self.aux(x)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(64, 3, 8, 8), torch.randint(0, 5, (64,)))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            out, aux = model(images)
            loss = F.cross_entropy(out, labels)
            loss = loss + 0.3 * F.cross_entropy(aux, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


main()
