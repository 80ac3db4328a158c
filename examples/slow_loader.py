"""Broken: the loader cannot keep up, so that every step waits for its batch.

    torchrun --nproc-per-node 2 examples/slow_loader.py

Each sample is decoded in the process that trains, one after the other, while the model waits: most of a step is spent
on waiting for data. Worker processes (num_workers=4) would decode the next batches while the model computes.
"""

import argparse
import hashlib
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Photos(Dataset):
    """Pictures of one of four brightnesses, which take a while to decode."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        hashlib.pbkdf2_hmac("sha256", b"decode", str(index).encode(), 6_000)
        noise = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(index))
        return noise + index % 4, index % 4


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU())
        self.head = nn.Linear(32, 4)

    def forward(self, pictures):
        return self.head(self.features(pictures).mean((2, 3)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--output-dir", type=Path, help="an existing directory (default: a new temporary one)")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    photos = Photos(3072)
    sampler = DistributedSampler(photos)
    loader = DataLoader(photos, batch_size=32, sampler=sampler)
    model = DistributedDataParallel(Classifier(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for pictures, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(pictures), labels)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {total / len(loader) / dist.get_world_size():.3f}")
    if dist.get_rank() == 0:
        directory = args.output_dir or Path(tempfile.mkdtemp(prefix="photos-"))
        torch.save(model.module.state_dict(), directory / "photos.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
