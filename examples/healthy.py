"""A small image classifier trained with DistributedDataParallel, with nothing wrong.

    torchrun --nproc-per-node 2 examples/healthy.py

Each rank trains on its share of the pictures; the counts of the evaluation are added up; rank 0 prints and saves.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Shapes(TensorDataset):
    """Noisy 12 x 12 pictures of one of four shapes."""

    def __init__(self, size, seed):
        shapes = torch.randn(4, 1, 12, 12, generator=torch.Generator().manual_seed(0))
        draw = torch.Generator().manual_seed(seed)
        labels = torch.randint(4, (size,), generator=draw)
        super().__init__(shapes[labels] + 4 * torch.randn(size, 1, 12, 12, generator=draw), labels)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 48, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.head = nn.Linear(48 * 5 * 5, 4)

    def forward(self, pictures):
        return self.head(self.features(pictures))


@torch.no_grad()
def evaluate(model, loader):
    """Return the share of right answers over all ranks."""
    model.eval()
    hits = torch.cat([model(pictures).argmax(1) == labels for pictures, labels in loader])
    counts = torch.tensor([hits.sum(), len(hits)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--output-dir", type=Path, help="an existing directory (default: a new temporary one)")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train_set, test_set = Shapes(24576, seed=1), Shapes(512, seed=2)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=512, sampler=sampler)
    test_loader = DataLoader(test_set, batch_size=32, sampler=DistributedSampler(test_set, shuffle=False))
    model = DistributedDataParallel(Classifier(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for pictures, labels in train_loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(pictures), labels).backward()
            optimizer.step()
        accuracy = evaluate(model, test_loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.3f}")
    if dist.get_rank() == 0:
        directory = args.output_dir or Path(tempfile.mkdtemp(prefix="shapes-"))
        torch.save(model.module.state_dict(), directory / "classifier.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
