"""Two views of each image against all others of all ranks: features gathered with gradients, a LARS-like optimizer."""

import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class GatherLayer(torch.autograd.Function):
    """Features of all ranks, with the gradient of all."""

    @staticmethod
    def forward(ctx, x):
        output = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(output, x)
        return tuple(output)

    @staticmethod
    def backward(ctx, *grads):
        stacked = torch.stack(grads)
        dist.all_reduce(stacked)
        return stacked[dist.get_rank()]


class Pairs(Dataset):
    def __len__(self):
        return 288

    def __getitem__(self, index):
        image = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(index))
        return self.augment(image), self.augment(image)

    @staticmethod
    def augment(image):
        return (image.flip(-1) if torch.rand(()) < 0.5 else image) + 0.1 * torch.randn(image.shape)


class LARS(torch.optim.Optimizer):
    def __init__(self, params, lr, weight_decay=1e-6, momentum=0.9, eta=0.001):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "eta": eta})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                update = p.grad.add(p, alpha=group["weight_decay"])
                if p.ndim > 1:
                    w, g = p.norm(), update.norm()
                    one = torch.ones_like(w)
                    update = update.mul(torch.where(w > 0, torch.where(g > 0, group["eta"] * w / g, one), one))
                kept = self.state[p].setdefault("mu", torch.zeros_like(p))
                kept.mul_(group["momentum"]).add_(update)
                p.add_(kept, alpha=-group["lr"])


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        )
        self.projector = nn.Sequential(nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, one, other):
        return tuple(F.normalize(self.projector(self.backbone(x)).float(), dim=1) for x in (one, other))


def nt_xent(z1, z2, temperature=0.2):
    z1, z2 = torch.cat(GatherLayer.apply(z1)), torch.cat(GatherLayer.apply(z2))
    z = torch.cat([z1, z2])
    similarity = z @ z.t() / temperature
    similarity.fill_diagonal_(float("-inf"))
    n = len(z1)
    target = torch.arange(2 * n, device=z.device).roll(n)
    return F.cross_entropy(similarity, target)


def adjust_learning_rate(args, optimizer, loader, step):
    total, warm = args.epochs * len(loader), len(loader)
    base = args.batch_size / 256
    if step < warm:
        lr = base * step / warm
    else:
        lr = base * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, total - warm)))
    for group in optimizer.param_groups:
        group["lr"] = lr * 0.2


def main_worker(gpu, args):
    args.rank = gpu
    dist.init_process_group(backend="nccl", init_method=args.dist_url, world_size=args.ngpus, rank=args.rank)
    torch.cuda.set_device(gpu)
    torch.backends.cudnn.benchmark = True
    model = Network().cuda(gpu)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = nn.parallel.DistributedDataParallel(model, device_ids=[gpu], gradient_as_bucket_view=True)
    optimizer = LARS(model.parameters(), lr=0.0)
    start_epoch = 0
    if os.path.isfile("contrastive.pth"):
        saved = torch.load("contrastive.pth", map_location="cpu")
        start_epoch = saved["epoch"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    data = Pairs()
    sampler = DistributedSampler(data, drop_last=True)
    per_device = args.batch_size // args.ngpus
    loader = DataLoader(data, batch_size=per_device, num_workers=1, pin_memory=True, sampler=sampler, drop_last=True)
    scaler = torch.amp.GradScaler(device="cuda")
    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        for step, (y1, y2) in enumerate(loader, start=epoch * len(loader)):
            y1, y2 = y1.cuda(gpu, non_blocking=True), y2.cuda(gpu, non_blocking=True)
            adjust_learning_rate(args, optimizer, loader, step)
            optimizer.zero_grad()
            with torch.amp.autocast("cuda", dtype=torch.bfloat16):
                z1, z2 = model(y1, y2)
            loss = nt_xent(z1, z2)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        shared = loss.detach().clone()
        dist.all_reduce(shared, op=dist.ReduceOp.AVG)
        if args.rank == 0:
            print(f"epoch {epoch}: {shared.item():.3f} over the features of all ranks")
            torch.save({"epoch": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()},
                       "contrastive.pth")
    dist.barrier()
    if args.rank == 0:
        torch.save(model.module.backbone.state_dict(), "backbone.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=3, type=int)
    parser.add_argument("--batch-size", default=32, type=int)
    parser.add_argument("--dist-url", default="tcp://localhost:58472")
    args = parser.parse_args()
    args.ngpus = torch.cuda.device_count()
    torch.multiprocessing.spawn(main_worker, (args,), args.ngpus)
