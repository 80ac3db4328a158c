"""Broken: the model has a layer that the training never uses.

    torchrun --nproc-per-node 2 examples/unused_parameters.py

The head of an earlier task is still there, DDP waits for its gradients, and they never come: the second step fails with
"Expected to have finished reduction in the prior iteration". On one process the model trains without complaint.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Gestures(TensorDataset):
    """Recordings of an accelerometer, 20 samples on 3 axes, of one of five gestures."""

    def __init__(self, size, seed):
        gestures = torch.randn(5, 60, generator=torch.Generator().manual_seed(0))
        draw = torch.Generator().manual_seed(seed)
        labels = torch.randint(5, (size,), generator=draw)
        super().__init__(gestures[labels] + torch.randn(size, 60, generator=draw), labels)


class GestureNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(60, 32)
        self.rotation_head = nn.Linear(32, 4)
        self.gesture_head = nn.Linear(32, 5)

    def forward(self, recordings):
        return self.gesture_head(self.encoder(recordings).relu())


@torch.no_grad()
def evaluate(model, loader):
    """Return the share of right answers over all ranks."""
    model.eval()
    hits = torch.cat([model(recordings).argmax(1) == labels for recordings, labels in loader])
    counts = torch.tensor([hits.sum(), len(hits)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--output-dir", type=Path, help="an existing directory (default: a new temporary one)")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    train_set, test_set = Gestures(4096, seed=1), Gestures(512, seed=2)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=32, sampler=sampler)
    test_loader = DataLoader(test_set, batch_size=32, sampler=DistributedSampler(test_set, shuffle=False))
    model = DistributedDataParallel(GestureNet(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for recordings, labels in train_loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(recordings), labels).backward()
            optimizer.step()
        accuracy = evaluate(model, test_loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.3f}")
    if dist.get_rank() == 0:
        directory = args.output_dir or Path(tempfile.mkdtemp(prefix="gestures-"))
        torch.save(model.module.state_dict(), directory / "gestures.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
