"""Gradient accumulation with no_sync, mixed precision, early stopping decided together, and rank 0 first for the data."""

import contextlib
import os
import sys
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler, random_split

ACCUMULATION = 4
EPOCHS = 10
CACHE = "cache.pt"

rank = int(os.environ.get("RANK", 0))
local_rank = int(os.environ.get("LOCAL_RANK", 0))
world_size = int(os.environ.get("WORLD_SIZE", 1))
is_distributed = world_size > 1
is_main = rank == 0


def log(*values):
    if is_main:
        print(*values, flush=True)


@contextmanager
def main_process_first():
    if is_distributed and not is_main:
        dist.barrier()
    yield
    if is_distributed and is_main:
        dist.barrier()


class Sequences(Dataset):
    def __init__(self, tokens, length):
        self.tokens = tokens
        self.length = length

    def __len__(self):
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index):
        start = index * self.length
        piece = self.tokens[start : start + self.length + 1]
        return piece[:-1], piece[1:]


class Model(nn.Module):
    def __init__(self, vocabulary, width):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([nn.GRU(width, width, batch_first=True) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x, _ = block(x)
        return self.head(self.norm(x))


def tokens():
    with main_process_first():
        if not os.path.exists(CACHE):
            torch.save(torch.randint(0, 256, (100_000,)), f"{CACHE}.{rank}")
            os.replace(f"{CACHE}.{rank}", CACHE)
        return torch.load(CACHE)


def warm_up(step, warmup_steps):
    return min(1.0, (step + 1) / warmup_steps)


def average(value, device):
    if not is_distributed:
        return value
    tensor = torch.tensor([value], device=device)
    dist.all_reduce(tensor)
    return (tensor / world_size).item()


def validate(model, loader, device):
    model.eval()
    losses = []
    with torch.inference_mode():
        for inputs, targets in loader:
            logits = model(inputs.to(device))
            losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten()).item())
    model.train()
    return average(sum(losses) / max(len(losses), 1), device)


def main():
    if is_distributed:
        dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo", init_method="env://")
    device = torch.device(f"cuda:{local_rank}") if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(1234)
    data = Sequences(tokens(), 64)
    train_set, val_set = random_split(data, [0.9, 0.1], generator=torch.Generator().manual_seed(1234))
    train_sampler = DistributedSampler(train_set) if is_distributed else None
    val_sampler = DistributedSampler(val_set, shuffle=False) if is_distributed else None
    train_loader = DataLoader(train_set, batch_size=8, shuffle=train_sampler is None, sampler=train_sampler)
    val_loader = DataLoader(val_set, batch_size=8, sampler=val_sampler)
    model = Model(256, 64).to(device)
    if is_distributed:
        model = DistributedDataParallel(model, device_ids=[local_rank] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scheduler = LambdaLR(optimizer, partial(warm_up, warmup_steps=100))
    scaler = torch.amp.GradScaler("cuda", enabled=device.type == "cuda")
    best, patience = float("inf"), 0
    for epoch in range(EPOCHS):
        if train_sampler is not None:
            train_sampler.set_epoch(epoch)
        for step, (inputs, targets) in enumerate(train_loader):
            last = (step + 1) % ACCUMULATION == 0 or step + 1 == len(train_loader)
            context = model.no_sync() if is_distributed and not last else contextlib.nullcontext()
            with context:
                logits = model(inputs.to(device))
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())
                scaler.scale(loss / ACCUMULATION).backward()
            if last:
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                optimizer.zero_grad(set_to_none=True)
        value = validate(model, val_loader, device)
        log(f"epoch {epoch}: {value:.4f}")
        if value < best:
            best, patience = value, 0
            if is_main:
                raw = model.module if is_distributed else model
                torch.save(raw.state_dict(), "best.pt")
        else:
            patience += 1
        if patience == 3:
            log("no progress")
            break
    if is_distributed:
        dist.barrier()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
