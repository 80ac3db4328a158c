"""Broken: nothing divides the training data among the ranks.

    torchrun --nproc-per-node 2 examples/missing_sampler.py

The loader shuffles, but every rank draws all 4,096 houses in every epoch, with equal seeds even in the same order. An
epoch on N ranks takes as long as on one and learns no more: N - 1 of the ranks are wasted. Nothing fails, and the error
goes down as it should. A DistributedSampler, with `set_epoch`, gives each rank its share.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Houses(TensorDataset):
    """Eight numbers about a house, and its price, all standardised."""

    def __init__(self, size, seed):
        weights = torch.randn(8, generator=torch.Generator().manual_seed(0)) / 3
        draw = torch.Generator().manual_seed(seed)
        facts = torch.randn(size, 8, generator=draw)
        super().__init__(facts, torch.sin(facts @ weights) + 0.1 * torch.randn(size, generator=draw))


class PriceModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1), nn.Flatten(0))

    def forward(self, facts):
        return self.layers(facts)


@torch.no_grad()
def evaluate(model, loader):
    """Return the mean squared error over all ranks."""
    model.eval()
    errors = torch.cat([model(facts) - prices for facts, prices in loader])
    sums = torch.tensor([errors.square().sum(), len(errors)])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--output-dir", type=Path, help="an existing directory (default: a new temporary one)")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train_set, test_set = Houses(4096, seed=1), Houses(512, seed=2)
    train_loader = DataLoader(train_set, batch_size=32, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=32, sampler=DistributedSampler(test_set, shuffle=False))
    model = DistributedDataParallel(PriceModel(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(args.epochs):
        model.train()
        for facts, prices in train_loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(facts), prices).backward()
            optimizer.step()
        error = evaluate(model, test_loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: squared error {error:.4f}")
    if dist.get_rank() == 0:
        directory = args.output_dir or Path(tempfile.mkdtemp(prefix="houses-"))
        torch.save(model.module.state_dict(), directory / "prices.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
