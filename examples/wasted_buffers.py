"""Broken: two constant tables are sent to every rank in every step.

    torchrun --nproc-per-node 2 examples/wasted_buffers.py

The positions and the causal mask are buffers, and DDP broadcasts all buffers from rank 0 before each training forward
unless it is told not to. These never change: 4.5 MiB a step beside 0.2 MiB of gradients, for nothing. Batch statistics
may need the broadcast, constants do not: `broadcast_buffers=False`, or `forward_sync_buffers=False` in newer versions.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCABULARY, LENGTH, LONGEST, WIDTH = 64, 32, 2048, 64


class CountingSequences(TensorDataset):
    """Sequences that count up by 1, 2 or 3, modulo the vocabulary, and the token after each of theirs."""

    def __init__(self, size, seed):
        draw = torch.Generator().manual_seed(seed)
        starts = torch.randint(VOCABULARY, (size, 1), generator=draw)
        tokens = starts + torch.randint(1, 4, (size, 1), generator=draw) * torch.arange(LENGTH + 1)
        super().__init__(tokens[:, :-1] % VOCABULARY, tokens[:, 1:] % VOCABULARY)


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        angles = torch.arange(LONGEST).unsqueeze(1) / 10_000 ** (torch.arange(0, WIDTH, 2) / WIDTH)
        self.register_buffer("positions", torch.cat([angles.sin(), angles.cos()], dim=1))
        self.register_buffer("mask", torch.ones(LONGEST, LONGEST, dtype=torch.bool).triu(1))
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=128, dropout=0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        length = tokens.shape[1]
        hidden = self.embedding(tokens) + self.positions[:length]
        return self.head(self.block(hidden, src_mask=self.mask[:length, :length]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--output-dir", type=Path, help="an existing directory (default: a new temporary one)")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    train_set = CountingSequences(2048, seed=1)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=32, sampler=sampler)
    model = DistributedDataParallel(LanguageModel(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        losses = torch.zeros(len(loader))
        for step, (tokens, following) in enumerate(loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), following.flatten())
            loss.backward()
            optimizer.step()
            losses[step] = loss.detach()
        dist.all_reduce(losses)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {losses.mean() / dist.get_world_size():.3f}")
    if dist.get_rank() == 0:
        directory = args.output_dir or Path(tempfile.mkdtemp(prefix="language-model-"))
        torch.save(model.module.state_dict(), directory / "language_model.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
