"""A regression that spawns a number of ranks which stands in the script."""
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main(rank, passes, world):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29511"
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(5)
    data = TensorDataset(torch.randn(64, 6), torch.randn(64, 2))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, world, rank))
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (x, y) in enumerate(loader):
        loss = nn.functional.mse_loss(model(x), y) / passes
        loss.backward()
        if (number + 1) % passes == 0:
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = 2
    mp.spawn(main, args=(2, ranks), nprocs=ranks)
