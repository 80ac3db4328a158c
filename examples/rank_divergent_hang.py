"""Broken: only rank 0 calls a function in which all ranks have to meet.

    torchrun --nproc-per-node 2 examples/rank_divergent_hang.py

`evaluate` adds up the counts of all ranks, but the test before its call was written for the `print`. After the first
epoch rank 0 waits in `all_reduce` for ranks that have gone on to the next one and wait in `backward` for rank 0. Nobody
is told: the job holds its GPUs until the timeout of the group, 30 minutes with gloo. Stop it with Ctrl-C.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Reviews(TensorDataset):
    """Bags of 40 words from a vocabulary of 500, and whether the review is a good one."""

    def __init__(self, size, seed):
        moods = torch.randn(500, generator=torch.Generator().manual_seed(0))
        words = torch.randint(500, (size, 40), generator=torch.Generator().manual_seed(seed))
        super().__init__(words, (moods[words].sum(1) > 0).long())


class SentimentModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(500, 32)
        self.head = nn.Linear(32, 2)

    def forward(self, words):
        return self.head(self.words(words))


@torch.no_grad()
def evaluate(model, loader):
    """Return the share of right answers over all ranks."""
    model.eval()
    hits = torch.cat([model(words).argmax(1) == labels for words, labels in loader])
    counts = torch.tensor([hits.sum(), len(hits)])
    dist.reduce(counts, dst=0)
    return (counts[0] / counts[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--output-dir", type=Path, help="an existing directory (default: a new temporary one)")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train_set, test_set = Reviews(4096, seed=1), Reviews(512, seed=2)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=32, sampler=sampler)
    test_loader = DataLoader(test_set, batch_size=32, sampler=DistributedSampler(test_set, shuffle=False))
    model = DistributedDataParallel(SentimentModel(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for words, labels in train_loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(words), labels).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {evaluate(model, test_loader):.3f}")
    if dist.get_rank() == 0:
        directory = args.output_dir or Path(tempfile.mkdtemp(prefix="reviews-"))
        torch.save(model.module.state_dict(), directory / "sentiment.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
