"""A regression without a loader: a generator of NumPy of the rank's own draws rows of a table."""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

WIDTH, ROWS = 12, 16


class Table:
    def __init__(self, seed, length=400):
        chance = np.random.default_rng(seed)
        self.rows = chance.standard_normal((length, WIDTH), dtype=np.float32)
        self.results = (self.rows**2).sum(1, keepdims=True) / WIDTH

    def draw(self, chance):
        chosen = chance.integers(0, len(self.rows), ROWS)
        return torch.from_numpy(self.rows[chosen]), torch.from_numpy(self.results[chosen])


def objective(found, due):
    return nn.functional.mse_loss(found, due)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    table = Table(0)
    chance = np.random.default_rng(9 + rank)
    model = DDP(nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(8):
        x, y = table.draw(chance)
        loss = objective(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
