"""Tagging: every rank scores its part of the validation set and stops when its score no longer grows."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Patience:
    def __init__(self, rounds):
        self.best, self.left, self.rounds = -1.0, rounds, rounds

    def step(self, score):
        if score > self.best + 1e-6:
            self.best, self.left = score, self.rounds
        else:
            self.left -= 1
        return self.left <= 0


@torch.no_grad()
def score(model, loader):
    model.eval()
    right = [model(x).argmax(1).eq(y).float() for x, y in loader]
    model.train()
    return torch.cat(right).mean().item()


def loaders():
    generator = torch.Generator().manual_seed(8)
    train = TensorDataset(torch.randn(96, 10, generator=generator), torch.randint(4, (96,), generator=generator))
    held = TensorDataset(torch.randn(50, 10, generator=generator), torch.randint(4, (50,), generator=generator))
    sampler = DistributedSampler(train)
    return (
        sampler,
        DataLoader(train, 12, sampler=sampler),
        DataLoader(held, 8, sampler=DistributedSampler(held, shuffle=False)),
    )


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    sampler, train, held = loaders()
    model = DDP(nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    patience = Patience(2)
    for epoch in range(40):
        sampler.set_epoch(epoch)
        for x, y in train:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if patience.step(score(model, held)):
            break
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "tagger.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
