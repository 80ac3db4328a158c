"""Imitation learning: frames of chosen episodes in random order, every rank takes its share of one order."""

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset


class EpisodeFrames(Sampler):
    def __init__(self, starts, ends, rank, replicas):
        self.frames = [frame for start, end in zip(starts, ends) for frame in range(start + 1, end - 1)]
        self.rank, self.replicas = rank, replicas

    def __len__(self):
        return len(self.frames) // self.replicas

    def __iter__(self):
        order = torch.randperm(len(self.frames))[: len(self) * self.replicas]
        for position in order[self.rank :: self.replicas].tolist():
            yield self.frames[position]


def set_seed(seed, rank):
    # Augmentation is to differ between the ranks.
    random.seed(seed + rank * 12345)
    torch.manual_seed(seed + rank * 12345)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    observations = torch.linspace(0, 1, 200 * 6).reshape(200, 6)
    data = TensorDataset(observations, observations.cos()[:, :2])
    set_seed(1000, rank)
    sampler = EpisodeFrames(range(0, 200, 20), range(20, 220, 20), rank, dist.get_world_size())
    loader = DataLoader(data, batch_size=6, sampler=sampler)
    policy = DDP(nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2)))
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4)
    for epoch in range(3):
        for seen, action in loader:
            noisy = seen + 0.01 * torch.randn_like(seen)
            loss = nn.functional.mse_loss(policy(noisy), action)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
