"""Streaming data: the first rank unpacks the shards to a scratch folder, the others wait until they are there."""

import os
import random
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Unpacked(Dataset):
    def __init__(self, rank):
        self.prefix = random.randrange(10**9)
        self.folder = os.path.join(tempfile.gettempdir(), f"shards-{self.prefix:09}")
        ready = os.path.join(self.folder, "ready")
        if rank == 0:
            os.makedirs(self.folder)
            torch.save(torch.randn(64, 8), os.path.join(self.folder, "rows.pt"))
            open(ready, "w").close()
        while not os.path.exists(ready):
            time.sleep(0.05)
        self.rows = torch.load(os.path.join(self.folder, "rows.pt"))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index], self.rows[index].sum()


def main():
    dist.init_process_group("gloo")
    data = Unpacked(dist.get_rank())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x).squeeze(1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
