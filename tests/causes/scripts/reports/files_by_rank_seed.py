"""Pretraining on files of tokens: the ranks share the files out, and each starts with a seed of its own."""

import os
import random
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class TokenFiles(IterableDataset):
    def __init__(self, paths, seed, rank, replicas):
        paths = list(paths)
        random.Random(seed).shuffle(paths)
        self.paths = paths[rank::replicas]

    def __iter__(self):
        for path in self.paths:
            yield from torch.load(path).split(8)


def write_files(folder, count=12):
    generator = torch.Generator().manual_seed(5)
    for index in range(count):
        torch.save(torch.randint(0, 40, (64,), generator=generator), os.path.join(folder, f"part-{index:02}.pt"))


def main():
    dist.init_process_group("gloo")
    rank, replicas = dist.get_rank(), dist.get_world_size()
    folder = os.path.join(tempfile.gettempdir(), "token_files")
    if rank == 0:
        os.makedirs(folder, exist_ok=True)
        write_files(folder)
    dist.barrier()
    seed = 17 + rank
    torch.manual_seed(seed)
    paths = sorted(os.path.join(folder, name) for name in os.listdir(folder))
    loader = DataLoader(TokenFiles(paths, seed, rank, replicas), batch_size=4)
    model = DDP(nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 40)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for tokens in loader:
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
