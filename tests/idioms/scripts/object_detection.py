"""Infinite loader, EMA and validation on rank 0 only, early stopping by a broadcast list, a numbered run directory."""

import argparse
import json
import logging
import math
import os
import sys
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, distributed
from tqdm import tqdm

FILE = Path(__file__).resolve()
ROOT = FILE.parents[0]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

LOCAL_RANK = int(os.getenv("LOCAL_RANK", -1))
RANK = int(os.getenv("RANK", -1))
WORLD_SIZE = int(os.getenv("WORLD_SIZE", 1))
LOGGER = logging.getLogger("detector")


@contextmanager
def torch_distributed_zero_first(local_rank):
    """Make all ranks wait for the first of the node to do something."""
    if local_rank not in [-1, 0]:
        dist.barrier()
    yield
    if local_rank == 0:
        dist.barrier()


class BoxDataset(Dataset):
    def __init__(self, path):
        cache = Path(path).with_suffix(".cache.pt")
        if not cache.exists():
            generator = torch.Generator().manual_seed(0)
            torch.save([torch.randn(3, 16, 16, generator=generator) for _ in range(96)], cache)
        self.images = torch.load(cache)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        boxes = torch.rand(1 + index % 3, 4, generator=torch.Generator().manual_seed(index))
        return self.images[index], torch.cat([torch.zeros(len(boxes), 1), boxes], dim=1)

    @staticmethod
    def collate_fn(batch):
        im, label = zip(*batch, strict=True)
        for i, lb in enumerate(label):
            lb[:, 0] = i
        return torch.stack(im, 0), torch.cat(label, 0)


class _RepeatSampler:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


class InfiniteDataLoader(DataLoader):
    """Reuses its workers: one iterator for ever."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", _RepeatSampler(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


def create_dataloader(path, batch_size, rank=-1, workers=2):
    with torch_distributed_zero_first(rank):
        dataset = BoxDataset(path)
    sampler = None if rank == -1 else distributed.DistributedSampler(dataset, shuffle=True)
    loader = InfiniteDataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=sampler is None,
        num_workers=workers,
        sampler=sampler,
        collate_fn=BoxDataset.collate_fn,
    )
    return loader, dataset


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.SiLU(), nn.AdaptiveAvgPool2d(1))
        self.detect = nn.Linear(8, 4)
        self.register_buffer("anchors", torch.ones(3, 2))

    def forward(self, x):
        return self.detect(self.model(x).flatten(1)).sigmoid()


class ModelEMA:
    def __init__(self, model, decay=0.9999, tau=2000):
        self.ema = deepcopy(model).eval()
        self.updates = 0
        self.decay = lambda x: decay * (1 - math.exp(-x / tau))
        for p in self.ema.parameters():
            p.requires_grad_(False)

    def update(self, model):
        self.updates += 1
        d = self.decay(self.updates)
        msd = model.state_dict()
        for k, v in self.ema.state_dict().items():
            if v.dtype.is_floating_point:
                v *= d
                v += (1 - d) * msd[k].detach()


class EarlyStopping:
    def __init__(self, patience=30):
        self.best_fitness, self.best_epoch, self.patience = 0.0, 0, patience

    def __call__(self, epoch, fitness):
        if fitness >= self.best_fitness:
            self.best_epoch, self.best_fitness = epoch, fitness
        return (epoch - self.best_epoch) >= self.patience


def increment_path(path):
    path = Path(path)
    n = 2
    candidate = path
    while candidate.exists():
        candidate = Path(f"{path}{n}")
        n += 1
    return candidate


def validate(model, loader):
    model.eval()
    total, seen = 0.0, 0
    with torch.no_grad():
        for imgs, targets in tqdm(loader, desc="val", bar_format="{l_bar}{bar:10}{r_bar}"):
            first = torch.stack([targets[targets[:, 0] == i][0, 1:] for i in range(len(imgs))])
            total += (model(imgs) - first).abs().mean().item()
            seen += 1
    return 1.0 - total / seen


def train(opt):
    save_dir, epochs, batch_size, weights = Path(opt.save_dir), opt.epochs, opt.batch_size, opt.weights
    w = save_dir / "weights"
    if RANK in {-1, 0}:
        w.mkdir(parents=True, exist_ok=True)
        with open(save_dir / "opt.json", "w") as f:
            json.dump(vars(opt), f, sort_keys=False, default=str)
    last, best = w / "last.pt", w / "best.pt"
    model = Detector()
    ema = ModelEMA(model) if RANK in {-1, 0} else None
    if weights and os.path.exists(weights):
        model.load_state_dict(torch.load(weights, map_location="cpu"), strict=False)
    train_loader, dataset = create_dataloader(opt.data, batch_size // WORLD_SIZE, LOCAL_RANK)
    val_loader = DataLoader(dataset, batch_size, collate_fn=BoxDataset.collate_fn) if RANK in {-1, 0} else None
    if RANK != -1:
        model = nn.parallel.DistributedDataParallel(model, static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.937, nesterov=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda x: (1 - x / epochs) * 0.99 + 0.01)
    nb = len(train_loader)
    nw = max(round(3 * nb), 10)
    last_opt_step = -1
    accumulate = 1
    stopper, stop = EarlyStopping(patience=opt.patience), False
    optimizer.zero_grad()
    for epoch in range(epochs):
        model.train()
        mloss = torch.zeros(1)
        if RANK != -1:
            train_loader.sampler.set_epoch(epoch)
        pbar = enumerate(train_loader)
        if RANK in {-1, 0}:
            pbar = tqdm(pbar, total=nb, bar_format="{l_bar}{bar:10}{r_bar}{bar:-10b}")
        for i, (imgs, targets) in pbar:
            ni = i + nb * epoch
            if ni <= nw:
                for x in optimizer.param_groups:
                    x["lr"] = 0.01 * ni / nw
            pred = model(imgs)
            first = torch.stack([targets[targets[:, 0] == k][0, 1:] for k in range(len(imgs))])
            loss = nn.functional.smooth_l1_loss(pred, first)
            if RANK != -1:
                loss *= WORLD_SIZE
            loss.backward()
            if ni - last_opt_step >= accumulate:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)
                optimizer.step()
                optimizer.zero_grad()
                if ema:
                    ema.update(model.module if RANK != -1 else model)
                last_opt_step = ni
            if RANK in {-1, 0}:
                mloss = (mloss * i + loss.detach()) / (i + 1)
                pbar.set_description(f"{epoch}/{epochs - 1} {mloss.item():.4g}")
        scheduler.step()
        if RANK in {-1, 0}:
            fi = validate(ema.ema, val_loader)
            stop = stopper(epoch=epoch, fitness=fi)
            ckpt = {"epoch": epoch, "ema": deepcopy(ema.ema).half().state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(ckpt, last)
            if stopper.best_epoch == epoch:
                torch.save(ckpt, best)
            del ckpt
        if RANK != -1:
            broadcast_list = [stop if RANK == 0 else None]
            dist.broadcast_object_list(broadcast_list, 0)
            if RANK != 0:
                stop = broadcast_list[0]
        if stop:
            break
    if RANK in {-1, 0} and best.exists():
        LOGGER.info("strip optimizer from %s", best)
        x = torch.load(best, map_location="cpu")
        x["optimizer"] = None
        torch.save(x, best)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", type=str, default="")
    parser.add_argument("--data", type=str, required=True)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--patience", type=int, default=100)
    parser.add_argument("--project", default="runs/train")
    parser.add_argument("--name", default="exp")
    opt = parser.parse_known_args()[0]
    opt.save_dir = str(increment_path(Path(opt.project) / opt.name))
    if LOCAL_RANK != -1:
        dist.init_process_group(backend="nccl" if dist.is_nccl_available() and torch.cuda.is_available() else "gloo")
    train(opt)
    if WORLD_SIZE > 1 and RANK != -1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
