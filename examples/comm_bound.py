"""Broken: the gradients are on their way for longer than the model computes.

    torchrun --nproc-per-node 2 examples/comm_bound.py

The layers are wide and a rank sees two samples a step, so that little computation stands against 50 MB of gradients,
which all ranks exchange in every step. Larger batches, or accumulation under no_sync(), send as much for more work.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH = 2048


class Signals(TensorDataset):
    """Long vectors, of which one of two directions gives the label."""

    def __init__(self, size, seed):
        draw = torch.Generator().manual_seed(seed)
        directions = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0))
        labels = torch.randint(2, (size,), generator=draw)
        super().__init__(directions[labels] + torch.randn(size, WIDTH, generator=draw), labels)


class WideModel(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        self.layers = nn.Sequential(*layers, nn.Linear(WIDTH, 2))

    def forward(self, signals):
        return self.layers(signals)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--output-dir", type=Path, help="an existing directory (default: a new temporary one)")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    signals = Signals(256, seed=1)
    sampler = DistributedSampler(signals)
    loader = DataLoader(signals, batch_size=2, sampler=sampler)
    model = DistributedDataParallel(WideModel(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for batch, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch), labels)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {total / len(loader) / dist.get_world_size():.3f}")
    if dist.get_rank() == 0:
        directory = args.output_dir or Path(tempfile.mkdtemp(prefix="signals-"))
        torch.save(model.module.state_dict(), directory / "signals.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
