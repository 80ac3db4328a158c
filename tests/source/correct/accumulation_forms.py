"""Gradient accumulation by a context chosen before and by hand; print is replaced; DDP only with several ranks."""

import builtins
import contextlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def hide_prints():
    if dist.get_rank() != 0:

        def nothing(*args, **kwargs):
            pass

        builtins.print = nothing


def validate(model, loader):
    correct = torch.zeros(1)
    with torch.no_grad():
        for (x,) in loader:
            correct += model.module(x).sum()
    dist.all_reduce(correct)
    return correct / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    hide_prints()
    world = dist.get_world_size()
    model = torch.nn.Linear(2, 2)
    if world > 1:
        model = DDP(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.ones(8, 2))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, sampler=sampler, drop_last=True)
    val = DistributedSampler(data)
    val_loader = DataLoader(data, sampler=val)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        val.set_epoch(epoch)
        for i, (x,) in enumerate(loader):
            last = (i + 1) % 4 == 0
            ctx = contextlib.nullcontext() if last else model.no_sync()
            with ctx:
                loss = model(x).sum()
                loss.backward()
            if last:
                opt.step()
                opt.zero_grad()
        opt.step()
        opt.zero_grad()
        for i, (x,) in enumerate(loader):
            model.require_backward_grad_sync = (i + 1) % 4 == 0
            model(x).sum().backward()
            if (i + 1) % 4 == 0:
                opt.step()
                opt.zero_grad()
        opt.step()
        opt.zero_grad()
        print(validate(model, val_loader))
        out = [torch.zeros(4) for _ in range(world)]
        dist.all_gather(out, torch.ones(4))
        if dist.get_rank() == 0:
            best = 3
        if dist.get_rank() == 0:
            print(best)
    if dist.get_rank() == 0:
        print("done")
    dist.destroy_process_group()


main()
