"""Forecasting: a batch with a loss that is not finite, or far too large, is skipped by all ranks."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Spikes:
    def __init__(self, factor=10.0):
        self.mean, self.factor = None, factor

    def skip(self, loss):
        bad = torch.zeros(1)
        if dist.get_rank() == 0:
            value = loss.item()
            if not math.isfinite(value) or (self.mean is not None and value > self.factor * self.mean):
                bad.fill_(1)
            else:
                self.mean = value if self.mean is None else 0.9 * self.mean + 0.1 * value
        dist.broadcast(bad, src=0)
        return bool(bad.item())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    fields = torch.randn(128, 6)
    fields[5] *= 1e30
    data = TensorDataset(fields, torch.randn(128, 2))
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model = DDP(nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    spikes = Spikes()
    for epoch in range(2):
        for field, target in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(field), target)
            if spikes.skip(loss):
                continue
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
