"""Broken: one rank has all the long texts, and the others wait for it in every step.

    torchrun --nproc-per-node 2 examples/straggler.py

The texts are sorted by length and each rank trains on one piece of the list: rank 1 reads 400 words where rank 0 reads
100, takes longer for its forward and its backward, and holds up every step. A DistributedSampler that shuffles, or
batches of like lengths that are dealt out to all ranks, would give every rank the same work.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset

LONGEST = 400


class Texts(TensorDataset):
    """Texts of one of two topics, sorted by length; 0 fills up the shorter ones."""

    def __init__(self, size, seed):
        draw = torch.Generator().manual_seed(seed)
        topics = torch.randint(2, (size,), generator=draw)
        words = torch.randint(1, 300, (size, LONGEST), generator=draw) + 200 * topics[:, None]
        words[: size // 2, LONGEST // 4 :] = 0
        super().__init__(words, topics)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(500, 64, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.head = nn.Linear(64, 2)

    def forward(self, words):
        return self.head(self.layer(self.words(words)).mean(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--output-dir", type=Path, help="an existing directory (default: a new temporary one)")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    texts, rank = Texts(1024, seed=1), dist.get_rank()
    share = len(texts) // dist.get_world_size()
    loader = DataLoader(Subset(texts, range(rank * share, (rank + 1) * share)), batch_size=8, shuffle=True)
    model = DistributedDataParallel(Reader(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(args.epochs):
        total = torch.zeros(())
        for words, topics in loader:
            optimizer.zero_grad()
            words = words[:, : int((words != 0).sum(1).max())]
            loss = nn.functional.cross_entropy(model(words), topics)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total / len(loader) / dist.get_world_size():.3f}")
    if rank == 0:
        directory = args.output_dir or Path(tempfile.mkdtemp(prefix="texts-"))
        torch.save(model.module.state_dict(), directory / "texts.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
