"""Planner with several objectives: their means over an epoch are reduced in one call."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

OBJECTIVES = {"imitation", "reward", "smoothness", "collision", "progress"}


def objectives_of(predicted, wanted):
    return {
        "imitation": (predicted - wanted).square().mean(),
        "reward": (predicted - 1).abs().mean(),
        "smoothness": predicted.diff(dim=1).square().mean(),
        "collision": predicted.clamp(min=0).mean(),
        "progress": (1 - predicted).clamp(min=0).mean(),
    }


def reduced(values):
    names = list(values)
    packed = torch.stack([values[name] for name in names])
    dist.all_reduce(packed)
    packed /= dist.get_world_size()
    return dict(zip(names, packed.tolist()))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    scenes = TensorDataset(torch.randn(120, 8), torch.randn(120, 4))
    sampler = DistributedSampler(scenes)
    loader = DataLoader(scenes, batch_size=10, sampler=sampler)
    planner = DDP(nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 4)))
    optimizer = torch.optim.AdamW(planner.parameters(), lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        totals = {name: torch.zeros(()) for name in OBJECTIVES}
        for scene, wanted in loader:
            found = objectives_of(planner(scene), wanted)
            optimizer.zero_grad()
            sum(found.values()).backward()
            optimizer.step()
            for name in OBJECTIVES:
                totals[name] += found[name].detach() / len(loader)
        means = reduced(totals)
        if dist.get_rank() == 0:
            print(epoch, means)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
