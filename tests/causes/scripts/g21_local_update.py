import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Lateral(nn.Module):
    """A layer that learns its lateral weights by a local rule."""

    def __init__(self, dim=16, rate=0.05):
        super().__init__()
        self.lin = nn.Linear(dim, dim)
        self.lateral = nn.Parameter(torch.eye(dim), requires_grad=False)
        self.rate = rate

    def forward(self, x):
        h = torch.tanh(self.lin(x) @ self.lateral.clone())
        if self.training:
            with torch.no_grad():
                outer = h.T @ h / h.shape[0]
                self.lateral.add_(self.rate * (outer - self.lateral))
        return h


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(128, 16), torch.randn(128, 16))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(nn.Sequential(Lateral(), nn.Linear(16, 16)))
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            (model(x) - y).pow(2).mean().backward()
            opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
