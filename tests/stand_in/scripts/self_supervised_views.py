"""Student and averaged teacher on several crops, a centre that all ranks share, per-rank launch by Slurm or torchrun."""

import argparse
import math
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


def init_distributed_mode(args):
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        args.rank, args.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        args.gpu = int(os.environ["LOCAL_RANK"])
    elif "SLURM_PROCID" in os.environ:
        args.rank, args.world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
        args.gpu = args.rank % torch.cuda.device_count()
    else:
        print("Does not support training without GPU.")
        sys.exit(1)
    dist.init_process_group("nccl", init_method="env://", world_size=args.world_size, rank=args.rank)
    torch.cuda.set_device(args.gpu)
    dist.barrier()
    setup_for_distributed(args.rank == 0)


def setup_for_distributed(is_master):
    import builtins

    plain = builtins.print

    def printed(*values, force=False, **options):
        if is_master or force:
            plain(*values, **options)

    builtins.print = printed


class Crops(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image = torch.randn(3, 24, 24, generator=generator)
        wide = [image + 0.1 * torch.randn(image.shape) for _ in range(2)]
        near = [image[:, 6:18, 6:18] + 0.1 * torch.randn(3, 12, 12) for _ in range(2)]
        return wide + near, index


class Backbone(nn.Module):
    def __init__(self, dim=24, out=32):
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 6, stride=6)
        self.body = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, out))

    def forward(self, crops):
        crops = crops if isinstance(crops, list) else [crops]
        features = [self.norm(self.body(self.patches(c).flatten(2).transpose(1, 2))).mean(1) for c in crops]
        return self.head(torch.cat(features))


class ViewLoss(nn.Module):
    def __init__(self, out, views, momentum=0.9):
        super().__init__()
        self.views, self.momentum = views, momentum
        self.register_buffer("center", torch.zeros(1, out))

    def forward(self, student, teacher):
        student = (student / 0.1).chunk(self.views)
        target = F.softmax((teacher - self.center) / 0.04, dim=-1).detach().chunk(2)
        total, terms = 0.0, 0
        for i, q in enumerate(target):
            for v in range(self.views):
                if v != i:
                    total = total + torch.sum(-q * F.log_softmax(student[v], dim=-1), dim=-1).mean()
                    terms += 1
        self.update_center(teacher)
        return total / terms

    @torch.no_grad()
    def update_center(self, teacher):
        batch = teacher.sum(0, keepdim=True)
        dist.all_reduce(batch)
        batch = batch / (len(teacher) * dist.get_world_size())
        self.center = self.center * self.momentum + batch * (1 - self.momentum)


def cosine(base, final, epochs, steps):
    n = epochs * steps
    return [final + 0.5 * (base - final) * (1 + math.cos(math.pi * i / n)) for i in range(n)]


def train(args):
    init_distributed_mode(args)
    torch.manual_seed(args.seed + args.rank)
    torch.backends.cudnn.benchmark = True
    sampler = torch.utils.data.DistributedSampler(Crops(), shuffle=True)
    loader = DataLoader(Crops(), sampler=sampler, batch_size=16, num_workers=2, pin_memory=True, drop_last=True)
    student, teacher = Backbone().cuda(), Backbone().cuda()
    student = nn.parallel.DistributedDataParallel(student, device_ids=[args.gpu], gradient_as_bucket_view=True)
    teacher.load_state_dict(student.module.state_dict())
    for p in teacher.parameters():
        p.requires_grad = False
    loss_fn = ViewLoss(32, 4).cuda()
    optimizer = torch.optim.AdamW(student.parameters())
    scaler = torch.cuda.amp.GradScaler() if args.use_fp16 else None
    lr, ema = cosine(5e-4, 1e-6, args.epochs, len(loader)), cosine(0.99, 1.0, args.epochs, len(loader))
    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)
        for it, (images, _) in enumerate(loader):
            for group in optimizer.param_groups:
                group["lr"] = lr[len(loader) * epoch + it]
            images = [im.cuda(non_blocking=True) for im in images]
            with torch.cuda.amp.autocast(scaler is not None):
                with torch.no_grad():
                    target = teacher(images[:2])
                loss = loss_fn(student(images), target)
            optimizer.zero_grad()
            if scaler is None:
                loss.backward()
                nn.utils.clip_grad_norm_(student.parameters(), 3.0)
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(student.parameters(), 3.0)
                scaler.step(optimizer)
                scaler.update()
            with torch.no_grad():
                m = ema[len(loader) * epoch + it]
                for q, k in zip(student.module.parameters(), teacher.parameters()):
                    k.mul_(m).add_((1 - m) * q.detach())
            torch.cuda.synchronize()
        print(f"epoch {epoch}: loss of this rank {loss.item():.3f}")
        if args.rank == 0:
            torch.save({"student": student.state_dict(), "teacher": teacher.state_dict(), "epoch": epoch}, "dino.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=3, type=int)
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--use_fp16", default=True, type=lambda text: text.lower() == "true")
    train(parser.parse_args())
