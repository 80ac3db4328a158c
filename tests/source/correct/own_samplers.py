"""Samplers of the project's own, loaders that make theirs, epochs told in many ways, and rank tests that are right."""

import random

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler


class RASampler(Sampler):
    def __init__(self, dataset, shuffle=True):
        self.dataset = dataset
        self.num_replicas = dist.get_world_size()
        self.rank = dist.get_rank()
        self.epoch = 0

    def __iter__(self):
        g = torch.Generator()
        g.manual_seed(self.epoch)
        indices = torch.randperm(len(self.dataset), generator=g).tolist()
        indices = indices[: len(self) * self.num_replicas]
        return iter(indices[self.rank :: self.num_replicas])

    def __len__(self):
        return len(self.dataset) // self.num_replicas

    def set_epoch(self, epoch):
        self.epoch = epoch


class Data(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, i):
        return torch.ones(2) * i


class ShardedLoader(DataLoader):
    def __init__(self, dataset, batch_size):
        super().__init__(dataset, batch_size=batch_size, sampler=DistributedSampler(dataset))


def make_sampler(dataset):
    return DistributedSampler(dataset) if dist.is_initialized() else None


def train_one(loader, model, opt, epoch):
    loader.sampler.set_epoch(epoch)
    for x in loader:
        opt.zero_grad()
        model(x).sum().backward()
        opt.step()


def train_batches(loader, model, opt, epoch):
    loader.batch_sampler.sampler.set_epoch(epoch)
    for x in loader:
        opt.zero_grad()
        model(x).sum().backward()
        opt.step()


def main():
    dist.init_process_group("gloo")
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(2, 2))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    data = Data()
    one = DataLoader(data, sampler=RASampler(data))
    two = ShardedLoader(data, 4)
    sampler = make_sampler(data)
    three = DataLoader(data, shuffle=(sampler is None), sampler=sampler)
    batches = torch.utils.data.BatchSampler(DistributedSampler(data), 4, True)
    four = DataLoader(data, batch_sampler=batches)
    five = DataLoader(data, sampler=DistributedSampler(data, shuffle=False), shuffle=False)
    for epoch in range(3):
        one.sampler.set_epoch(epoch)
        for x in one:
            opt.zero_grad()
            model(x).sum().backward()
            opt.step()
        train_one(two, model, opt, epoch)
        train_one(three, model, opt, epoch)
        train_batches(four, model, opt, epoch)
        for x in five:
            opt.zero_grad()
            model(x).sum().backward()
            opt.step()
    torch.manual_seed(dist.get_rank())
    for step in range(100):
        x = torch.randn(4, 2)
        opt.zero_grad()
        model(x).sum().backward()
        opt.step()
    if dist.get_rank() == 0:
        payload = [{"a": 1}]
    else:
        payload = [None]
    dist.broadcast_object_list(payload, 0)
    if dist.get_rank() != 0:
        dist.barrier()
    print(payload)
    if dist.get_rank() == 0:
        dist.barrier()
    traced = False
    if traced:
        if dist.get_rank() == 0:
            dist.barrier()
    group = dist.new_group([0, 1])
    if dist.get_rank() in (0, 1):
        t = torch.ones(1)
        dist.all_reduce(t, group=group)
    stop = torch.zeros(1)
    for step in range(10):
        stop += model(torch.randn(2, 2)).sum().detach()
        dist.all_reduce(stop)
        if stop.item() > 3:
            break
    dist.barrier()
    save_on_master(model.module.state_dict())
    dist.destroy_process_group()


def save_on_master(state):
    if dist.get_rank() != 0:
        return
    torch.save(state, "last.pt")


if __name__ == "__main__":
    main()
