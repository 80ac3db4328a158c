"""Language model on random batches: no loader, seed offset by rank, runs with or without ranks."""

import math
import os
import time

import torch
import torch.nn as nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

out_dir = "out"
eval_interval = 100
eval_iters = 20
max_iters = 500
gradient_accumulation_steps = 8
batch_size = 12
block_size = 64
backend = "nccl"
device = "cuda" if torch.cuda.is_available() else "cpu"

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend=backend if device == "cuda" else "gloo")
    ddp_rank = int(os.environ["RANK"])
    ddp_local_rank = int(os.environ["LOCAL_RANK"])
    ddp_world_size = int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        device = f"cuda:{ddp_local_rank}"
        torch.cuda.set_device(device)
    master_process = ddp_rank == 0
    seed_offset = ddp_rank
    assert gradient_accumulation_steps % ddp_world_size == 0
    gradient_accumulation_steps //= ddp_world_size
else:
    master_process = True
    seed_offset = 0
    ddp_world_size = 1

if master_process:
    os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337 + seed_offset)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, vocabulary=256, width=64):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(2)])
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens, targets=None):
        logits = self.head(self.blocks(self.embedding(tokens)))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


data = {"train": torch.randint(0, 256, (100_000,)), "val": torch.randint(0, 256, (10_000,))}


def get_batch(split):
    tokens = data[split]
    starts = torch.randint(len(tokens) - block_size, (batch_size,))
    x = torch.stack([tokens[i : i + block_size] for i in starts])
    y = torch.stack([tokens[i + 1 : i + 1 + block_size] for i in starts])
    return x.to(device), y.to(device)


model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
if ddp:
    model = DDP(model, device_ids=[ddp_local_rank] if "cuda" in device else None)
raw_model = model.module if ddp else model


@torch.no_grad()
def estimate_loss():
    result = {}
    raw_model.eval()
    for split in ("train", "val"):
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            x, y = get_batch(split)
            _, loss = raw_model(x, y)
            losses[k] = loss.item()
        result[split] = losses.mean()
    raw_model.train()
    return result


def learning_rate(iteration):
    return 6e-4 * 0.5 * (1 + math.cos(math.pi * iteration / max_iters))


iteration = 0
best = 1e9
x, y = get_batch("train")
t0 = time.time()
while True:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(iteration)
    if iteration % eval_interval == 0 and master_process:
        losses = estimate_loss()
        print(f"step {iteration}: {losses['train']:.4f} {losses['val']:.4f}")
        if losses["val"] < best:
            best = losses["val"]
            if iteration > 0:
                checkpoint = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(checkpoint, os.path.join(out_dir, "ckpt.pt"))
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        _, loss = model(x, y)
        loss = loss / gradient_accumulation_steps
        x, y = get_batch("train")
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if iteration % 10 == 0 and master_process:
        print(f"iter {iteration}: {loss.item():.4f}, {time.time() - t0:.1f} s")
    iteration += 1
    if iteration > max_iters:
        break

if ddp:
    destroy_process_group()
