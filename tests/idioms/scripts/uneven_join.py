"""Ranks with different amounts of data, under join(), with a comm hook that compresses gradients to fp16."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


class RankFiles(Dataset):
    """What this rank's disk holds: the number of samples differs from rank to rank."""

    def __init__(self, rank):
        generator = torch.Generator().manual_seed(100 + rank)
        self.x = torch.randn(40 + 8 * rank, 6, generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.x[index].prod().unsqueeze(0)


def train_epoch(model, loader, optimizer):
    with Join([model]):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)))
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(RankFiles(rank), batch_size=4, shuffle=True)
    for epoch in range(3):
        train_epoch(model, loader, optimizer)
        norm = sum(p.detach().norm() for p in model.parameters())
        gathered = [torch.zeros(()) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, norm)
        if rank == 0:
            print(f"epoch {epoch}: norms {[round(value.item(), 4) for value in gathered]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
