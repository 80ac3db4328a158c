"""A one-stage detector: SyncBatchNorm, averaged weights, warm-up per parameter group, own collate, best checkpoint."""

import argparse
import copy
import logging
import math
import os
import time
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.cuda import amp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, distributed

LOCAL_RANK = int(os.getenv("LOCAL_RANK", -1))
RANK = int(os.getenv("RANK", -1))
WORLD_SIZE = int(os.getenv("WORLD_SIZE", 1))
LOGGER = logging.getLogger("detector")


@contextmanager
def torch_distributed_zero_first(local_rank):
    if local_rank not in (-1, 0):
        dist.barrier(device_ids=[local_rank])
    yield
    if local_rank == 0:
        dist.barrier(device_ids=[0])


def select_device(device="", batch_size=0):
    assert torch.cuda.is_available() and torch.cuda.device_count() >= 1, f"Invalid CUDA '--device {device}'"
    devices = range(torch.cuda.device_count())
    if batch_size > 0:
        assert batch_size % len(devices) == 0, f"batch-size {batch_size} not multiple of GPU count {len(devices)}"
    for i in devices:
        p = torch.cuda.get_device_properties(i)
        LOGGER.info("CUDA:%d (%s, %.0fMiB)", i, p.name, p.total_memory / (1 << 20))
    return torch.device("cuda:0")


class Boxes(Dataset):
    def __len__(self):
        return 320

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image = (torch.rand(3, 32, 32, generator=generator) * 255).to(torch.uint8)
        labels = torch.zeros(1 + index % 3, 6)
        labels[:, 1] = index % 4
        labels[:, 2:] = torch.rand(len(labels), 4, generator=generator)
        return image, labels

    @staticmethod
    def collate_fn(batch):
        images, labels = zip(*batch)
        for i, label in enumerate(labels):
            label[:, 0] = i
        return torch.stack(images), torch.cat(labels)


def conv(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.SiLU(inplace=True))


class Model(nn.Module):
    def __init__(self, nc=4):
        super().__init__()
        self.nc, self.no = nc, nc + 5
        self.model = nn.Sequential(conv(3, 8), conv(8, 16), conv(16, 16), nn.Conv2d(16, self.no, 1))

    def forward(self, x):
        return self.model(x).permute(0, 2, 3, 1)


class ComputeLoss:
    def __init__(self, model):
        self.device = next(model.parameters()).device
        self.bce = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0], device=self.device))

    def __call__(self, p, targets):
        n, h, w, _ = p.shape
        lcls, lbox = torch.zeros(1, device=self.device), torch.zeros(1, device=self.device)
        tobj = torch.zeros(n, h, w, device=self.device)
        b = targets[:, 0].long()
        gi, gj = ((targets[:, 2 + k] * size).long().clamp(0, size - 1) for k, size in ((0, w), (1, h)))
        chosen = p[b, gj, gi]
        lbox += (chosen[:, :4].sigmoid() - targets[:, 2:6]).abs().mean()
        tobj[b, gj, gi] = 1.0
        t = torch.zeros_like(chosen[:, 5:])
        t[range(len(b)), targets[:, 1].long()] = 1.0
        lcls += self.bce(chosen[:, 5:], t)
        return (lbox + lcls + self.bce(p[..., 4], tobj)) * n, torch.cat((lbox, lcls)).detach()


class ModelEMA:
    def __init__(self, model, decay=0.999, tau=200):
        self.ema, self.updates = copy.deepcopy(model).eval(), 0
        self.decay = lambda x: decay * (1 - math.exp(-x / tau))

    def update(self, model):
        self.updates += 1
        d, msd = self.decay(self.updates), model.module.state_dict()
        for k, v in self.ema.state_dict().items():
            if v.dtype.is_floating_point:
                v *= d
                v += (1 - d) * msd[k].detach()


def main(opt):
    device = select_device(opt.device, opt.batch_size)
    assert torch.cuda.device_count() > LOCAL_RANK, "insufficient CUDA devices for DDP command"
    torch.cuda.set_device(LOCAL_RANK)
    device = torch.device("cuda", LOCAL_RANK)
    dist.init_process_group(backend="nccl" if dist.is_nccl_available() else "gloo")
    save_dir = Path(opt.project)
    with torch_distributed_zero_first(LOCAL_RANK):
        save_dir.mkdir(parents=True, exist_ok=True)
    model = Model().to(device)
    ema = ModelEMA(model) if RANK == 0 else None
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model).to(device)
    model = DDP(model, device_ids=[LOCAL_RANK], output_device=LOCAL_RANK, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.937, nesterov=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda x: (1 - x / opt.epochs) * 0.99 + 0.01)
    scaler = amp.GradScaler(enabled=device.type != "cpu")
    data = Boxes()
    loader = DataLoader(data, batch_size=opt.batch_size // WORLD_SIZE, num_workers=1, pin_memory=True,
                        sampler=distributed.DistributedSampler(data, shuffle=True), collate_fn=Boxes.collate_fn)
    compute_loss, best, t0 = ComputeLoss(model), float("inf"), time.time()
    for epoch in range(opt.epochs):
        model.train()
        mloss = torch.zeros(2, device=device)
        loader.sampler.set_epoch(epoch)
        optimizer.zero_grad()
        for i, (imgs, targets) in enumerate(loader):
            imgs = imgs.to(device, non_blocking=True).float() / 255
            with amp.autocast(device.type != "cpu"):
                loss, items = compute_loss(model(imgs).float(), targets.to(device))
                loss *= WORLD_SIZE
            scaler.scale(loss.sum()).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if ema:
                ema.update(model)
            mloss = (mloss * i + items) / (i + 1)
        scheduler.step()
        dist.all_reduce(mloss, op=dist.ReduceOp.AVG)
        if RANK in (-1, 0):
            mem = f"{torch.cuda.memory_reserved() / 1e9 if torch.cuda.is_available() else 0:.3g}G"
            LOGGER.info("%d/%d %s %s %.1fs", epoch, opt.epochs, mem, mloss.tolist(), time.time() - t0)
            ckpt = {"epoch": epoch, "model": copy.deepcopy(model.module).half(), "ema": copy.deepcopy(ema.ema).half()}
            torch.save(ckpt, save_dir / "last.pt")
            if mloss.sum() < best:
                best = mloss.sum()
                torch.save(ckpt, save_dir / "best.pt")
    torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--device", default="")
    parser.add_argument("--project", default="runs/exp")
    main(parser.parse_args())
