"""Masked pretraining with checkpointed blocks, accumulation by no_sync, and averages that all ranks share."""

import argparse
import contextlib
import json
import math
import os
import sys
from collections import deque

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class SmoothedValue:
    def __init__(self, window=20):
        self.deque, self.total, self.count = deque(maxlen=window), 0.0, 0

    def update(self, value):
        self.deque.append(value)
        self.total += value
        self.count += 1

    def synchronize_between_processes(self):
        t = torch.tensor([self.count, self.total], dtype=torch.float64, device="cuda")
        dist.barrier()
        dist.all_reduce(t)
        self.count, self.total = t.tolist()

    @property
    def global_avg(self):
        return self.total / max(self.count, 1)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class MaskedAutoencoder(nn.Module):
    def __init__(self, patches=16, patch=12, dim=32):
        super().__init__()
        self.embed = nn.Linear(patch, dim)
        self.place = nn.Parameter(torch.zeros(1, patches, dim), requires_grad=False)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.encoder = nn.ModuleList(Block(dim) for _ in range(2))
        self.decoder = Block(dim)
        self.pred = nn.Linear(dim, patch)
        nn.init.normal_(self.mask_token, std=0.02)

    def forward(self, patches, mask_ratio=0.75):
        n, length, _ = patches.shape
        keep = int(length * (1 - mask_ratio))
        order = torch.rand(n, length, device=patches.device).argsort(dim=1)
        restore = order.argsort(dim=1)
        x = self.embed(patches) + self.place
        x = x.gather(1, order[:, :keep, None].expand(-1, -1, x.shape[2]))
        for block in self.encoder:
            x = checkpoint(block, x, use_reentrant=False)
        filled = torch.cat([x, self.mask_token.expand(n, length - keep, -1).to(x.dtype)], dim=1)
        x = filled.gather(1, restore[:, :, None].expand(-1, -1, x.shape[2])) + self.place
        error = (self.pred(self.decoder(x)) - patches).square().mean(-1)
        mask = (restore >= keep).to(error.dtype)
        return (error * mask).sum() / mask.sum()


def main(args):
    args.gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(args.gpu)
    dist.init_process_group(backend="nccl")
    dist.barrier(device_ids=[args.gpu])
    device = torch.device("cuda")
    torch.manual_seed(args.seed + dist.get_rank())
    data = TensorDataset(torch.randn(512, 16, 12, generator=torch.Generator().manual_seed(0)))
    sampler = DistributedSampler(data, num_replicas=dist.get_world_size(), rank=dist.get_rank(), shuffle=True)
    loader = DataLoader(data, sampler=sampler, batch_size=8, num_workers=1, pin_memory=True, drop_last=True)
    model = MaskedAutoencoder().to(device)
    model_without_ddp = model
    model = nn.parallel.DistributedDataParallel(
        model, device_ids=[args.gpu], static_graph=False, gradient_as_bucket_view=True
    )
    optimizer = torch.optim.AdamW(model_without_ddp.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        stats = train_one_epoch(model, loader, optimizer, scaler, device, epoch, args)
        if dist.get_rank() == 0:
            os.makedirs(args.output_dir, exist_ok=True)
            torch.save({"model": model_without_ddp.state_dict(), "optimizer": optimizer.state_dict(),
                        "scaler": scaler.state_dict(), "epoch": epoch}, f"{args.output_dir}/checkpoint-{epoch}.pth")
            with open(os.path.join(args.output_dir, "log.txt"), mode="a", encoding="utf-8") as f:
                f.write(json.dumps({"epoch": epoch, **stats}) + "\n")
    dist.destroy_process_group()


def train_one_epoch(model, loader, optimizer, scaler, device, epoch, args):
    model.train()
    meter = SmoothedValue()
    optimizer.zero_grad()
    for step, (samples,) in enumerate(loader):
        samples = samples.to(device, non_blocking=True)
        update = (step + 1) % args.accum_iter == 0
        with contextlib.nullcontext() if update else model.no_sync():
            with torch.amp.autocast("cuda"):
                loss = model(samples, mask_ratio=args.mask_ratio)
            total = loss.detach().float()
            dist.all_reduce(total)
            if not math.isfinite(total.item()):
                print(f"Loss is {total.item()}, stopping training")
                sys.exit(1)
            scaler.scale(loss / args.accum_iter).backward()
        if update:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        meter.update(total.item() / dist.get_world_size())
    meter.synchronize_between_processes()
    return {"train_loss": meter.global_avg}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=3, type=int)
    parser.add_argument("--accum_iter", default=2, type=int)
    parser.add_argument("--mask_ratio", default=0.75, type=float)
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--output_dir", default="mae_out")
    main(parser.parse_args())
