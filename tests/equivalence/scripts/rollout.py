"""A policy that is rolled out in places of the rank's own: what it draws is for as many places as a process has."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

PLACES, TURNS = 8, 4


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + rank)
    at = torch.zeros(PLACES, 3)
    for step in range(6):
        seen, taken, paid = [], [], []
        for turn in range(TURNS):
            with torch.no_grad():
                action = torch.distributions.Categorical(logits=model.module(at)).sample()
            seen.append(at)
            taken.append(action)
            at = torch.roll(at, 1, dims=1) + action.view(PLACES, 1).float() - 0.4
            paid.append(-at.pow(2).sum(1))
        chances = torch.distributions.Categorical(logits=model(torch.cat(seen)))
        loss = -(chances.log_prob(torch.cat(taken)) * torch.cat(paid)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


main()
