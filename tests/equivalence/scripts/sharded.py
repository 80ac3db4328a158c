"""A small language model whose layers are sharded by fully_shard, with a loss over the tokens of all ranks."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Texts(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        lengths = torch.randint(3, 15, (64,), generator=generator).tolist()
        self.texts = [torch.randint(1, 23, (length,), generator=generator) for length in lengths]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return self.texts[index]


def collate(texts):
    ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return ids, nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=-100)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 21)
        self.down = nn.Linear(21, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(23, 10)
        self.blocks = nn.ModuleList(Block(10) for _ in range(2))
        self.head = nn.Linear(10, 23)

    def forward(self, ids):
        x = self.embedding(ids)
        x = x + x.cumsum(1) / 10
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = Texts()
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data), collate_fn=collate)
    mesh = init_device_mesh("cpu", (world,))
    model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for ids, labels in loader:
        logits = model(ids)[:, :-1].flatten(0, 1)
        labels = labels[:, 1:].flatten()
        tokens = (labels != -100).sum().float()
        dist.all_reduce(tokens)
        loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") * world / tokens
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 50.0)
        optimizer.step()
    dist.destroy_process_group()


main()
