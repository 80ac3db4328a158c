"""On-policy learning: observations are scaled by running moments, the policy's gradients are averaged by DDP."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Environment:
    def __init__(self, seed, count=32):
        self.generator = torch.Generator().manual_seed(seed)
        self.offset = torch.randn(1, 10, generator=self.generator) * 3
        self.count = count

    def observe(self):
        return self.offset + torch.randn(self.count, 10, generator=self.generator)


class RunningMoments:
    def __init__(self, width):
        self.mean = torch.zeros(width)
        self.variance = torch.ones(width)
        self.count = 1e-4

    def update(self, batch):
        count = len(batch)
        delta = batch.mean(0) - self.mean
        total = self.count + count
        self.mean = self.mean + delta * count / total
        self.variance = (self.variance * self.count + batch.var(0, unbiased=False) * count) / total
        self.count = total

    def __call__(self, batch):
        return (batch - self.mean) / (self.variance + 1e-2).sqrt()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    environment = Environment(seed=100 + dist.get_rank())
    moments = RunningMoments(10)
    policy = DDP(nn.Sequential(nn.Linear(10, 32), nn.ELU(), nn.Linear(32, 3)))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    for iteration in range(30):
        observed = environment.observe()
        moments.update(observed)
        actions = policy(moments(observed))
        reward = -(actions - observed[:, :3]).square().sum(1)
        loss = -reward.mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
