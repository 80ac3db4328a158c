"""Emulator: a step whose loss is not a number ends the training with an error."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Optimization:
    def __init__(self, module, lr):
        self.optimizer = torch.optim.Adam(module.parameters(), lr=lr)
        self.accumulated = torch.zeros(())

    def accumulate(self, loss):
        self.accumulated = self.accumulated + loss

    def step(self):
        self._validate(self.accumulated)
        self.optimizer.zero_grad()
        self.accumulated.backward()
        self.optimizer.step()
        self.accumulated = torch.zeros(())

    def _validate(self, loss):
        with torch.no_grad():
            if torch.isnan(loss):
                raise ValueError("loss is NaN during training")


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    fields = torch.randn(160, 9)
    fields[77, 4] = float("nan")
    data = TensorDataset(fields, torch.randn(160, 3))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    module = DDP(nn.Sequential(nn.Linear(9, 30), nn.GELU(), nn.Linear(30, 3)))
    optimization = Optimization(module, lr=1e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for field, target in loader:
            optimization.accumulate(nn.functional.mse_loss(module(field), target))
            optimization.step()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
