"""Molecular dynamics: each kind of output of the model is brought together in its own way."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

SUPPORTED = {"energy", "stress", "forces", "charges", "dipole"}
PER_GRAPH = ("energy", "stress", "dipole")


class Potential(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 16), nn.SiLU())
        self.heads = nn.ModuleDict({name: nn.Linear(16, 1) for name in sorted(SUPPORTED)})

    def forward(self, positions, wanted):
        hidden = self.body(positions)
        return {name: self.heads[name](hidden) for name in wanted & SUPPORTED}


def consolidate(outputs):
    whole = {}
    for name, value in outputs.items():
        value = value.detach()
        if name in PER_GRAPH:
            total = value.sum()
            dist.all_reduce(total)
            whole[name] = total
        else:
            parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, value)
            whole[name] = torch.cat(parts)
    return whole


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(Potential())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(20):
        positions = torch.randn(16, 3)
        outputs = model(positions, {"energy", "stress", "forces", "charges", "dipole"})
        loss = sum(value.square().mean() for value in outputs.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        consolidate(outputs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
