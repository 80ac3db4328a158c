"""A regression that is told the number of its ranks."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--passes", type=int, default=2)
parser.add_argument("--processes", type=int, default=2)
options = parser.parse_args()
PASSES, ranks = options.passes, options.processes


def main():
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    torch.manual_seed(5)
    data = TensorDataset(torch.randn(64, 6), torch.randn(64, 2))
    loader = DataLoader(data, batch_size=8 // ranks, sampler=DistributedSampler(data, ranks, rank))
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (x, y) in enumerate(loader):
        loss = nn.functional.mse_loss(model(x), y) / PASSES
        loss.backward()
        if (number + 1) % PASSES == 0:
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


main()
