"""Broken: a rank that meets a bad batch skips its backward, alone.

    torchrun --nproc-per-node 2 examples/silent_desync.py

Two records of the data are not numbers, so each rank skips one batch, at another time. Until the second skip, DDP adds
gradients of different steps, made under different learning rates. The job ends with exit code 0 and a model that is not
the same on both ranks; with one skip more on one side it would hang at the end of the epoch.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Turbines(TensorDataset):
    """Ten vibration sensors of a turbine, and its wear; the sensors were unplugged twice."""

    def __init__(self, size, seed, unplugged=()):
        weights = torch.randn(10, generator=torch.Generator().manual_seed(0)) / 3
        draw = torch.Generator().manual_seed(seed)
        vibrations = torch.randn(size, 10, generator=draw)
        wear = torch.tanh(vibrations @ weights) + 0.1 * torch.randn(size, generator=draw)
        vibrations[list(unplugged)] = float("nan")
        super().__init__(vibrations, wear)


class WearModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 64), nn.GELU(), nn.Linear(64, 1), nn.Flatten(0))

    def forward(self, vibrations):
        return self.layers(vibrations)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--output-dir", type=Path, help="an existing directory (default: a new temporary one)")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train_set = Turbines(4096, seed=1, unplugged=(2775, 2913))
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=32, sampler=sampler)
    model = DistributedDataParallel(WearModel(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        losses = torch.zeros(len(loader))
        for step, (vibrations, wear) in enumerate(loader):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(vibrations), wear)
            if loss.isfinite():  # keep bad records out of the weights
                loss.backward()
                optimizer.step()
                losses[step] = loss.detach()
            scheduler.step()
        dist.all_reduce(losses)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {losses.mean() / dist.get_world_size():.4f}")
    if dist.get_rank() == 0:
        directory = args.output_dir or Path(tempfile.mkdtemp(prefix="turbines-"))
        torch.save(model.module.state_dict(), directory / "wear.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
