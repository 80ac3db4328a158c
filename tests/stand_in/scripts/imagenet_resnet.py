"""Residual classifier with mp.spawn over the GPUs of the node, meters on the device and a resumable checkpoint."""

import argparse
import os
import random

import torch
import torch.backends.cudnn as cudnn
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", default=3, type=int)
parser.add_argument("--batch-size", default=64, type=int, help="of all GPUs of the node")
parser.add_argument("--lr", default=0.05, type=float)
parser.add_argument("--workers", default=2, type=int)
parser.add_argument("--resume", default="checkpoint.pt")
parser.add_argument("--seed", default=None, type=int)
parser.add_argument("--nodes", default=1, type=int)
parser.add_argument("--node", default=0, type=int)


class Shapes(Dataset):
    """Squares of one brightness on noise."""

    def __init__(self, count, size=24):
        self.count, self.size = count, size

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image = torch.randn(3, self.size, self.size, generator=generator)
        label = index % 4
        image[:, label * 4 : label * 4 + 4] += 2.0
        return image, label


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])

    def forward(self, x):
        y = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(x + self.norms[1](self.second(y)))


def build():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), Block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 4),
    )


def main():
    args = parser.parse_args()
    if args.seed is not None:
        random.seed(args.seed)
        torch.manual_seed(args.seed)
        cudnn.deterministic = True
    if not torch.cuda.is_available():
        raise SystemExit("no GPU was found")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29741")
    per_node = torch.cuda.device_count()
    mp.spawn(work, nprocs=per_node, args=(per_node, args))


def work(gpu, per_node, args):
    rank = args.node * per_node + gpu
    dist.init_process_group("nccl", world_size=per_node * args.nodes, rank=rank)
    torch.cuda.set_device(gpu)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(build()).cuda(gpu)
    model = DistributedDataParallel(model, device_ids=[gpu])
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1).cuda(gpu)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])
    start = 0
    if os.path.isfile(args.resume):
        saved = torch.load(args.resume, map_location=f"cuda:{gpu}")
        start = saved["epoch"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
    cudnn.benchmark = True

    train_set, held_out = Shapes(512), Shapes(96)
    sampler = DistributedSampler(train_set)
    share = args.batch_size // per_node
    loading = {"num_workers": args.workers // per_node, "pin_memory": True}
    loader = DataLoader(train_set, batch_size=share, sampler=sampler, **loading)
    val_loader = DataLoader(
        held_out, batch_size=share, sampler=DistributedSampler(held_out, shuffle=False, drop_last=True), **loading
    )
    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        train(loader, model, criterion, optimizer, gpu, rank, epoch)
        top1 = validate(val_loader, model, gpu)
        schedule.step()
        if rank == 0:
            print(f"epoch {epoch}: {100 * top1:.1f}% on {torch.cuda.get_device_name(gpu)}")
            state = {"epoch": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state["schedule"] = schedule.state_dict()
            torch.save(state, args.resume)
    dist.destroy_process_group()


def train(loader, model, criterion, optimizer, gpu, rank, epoch):
    model.train()
    for step, (images, target) in enumerate(loader):
        images = images.cuda(gpu, non_blocking=True)
        target = target.cuda(gpu, non_blocking=True)
        loss = criterion(model(images), target)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 10 == 0 and rank == 0:
            held = torch.cuda.max_memory_allocated() / 2**20
            print(f"[{epoch}][{step}/{len(loader)}] loss {loss.detach().item():.3f} mem {held:.0f} MB")


def validate(loader, model, gpu):
    model.eval()
    seen = torch.zeros(2, device=f"cuda:{gpu}")
    with torch.no_grad():
        for images, target in loader:
            output = model(images.cuda(gpu, non_blocking=True))
            hits = (output.argmax(1) == target.cuda(gpu, non_blocking=True)).sum()
            seen += torch.stack([hits, torch.tensor(len(target), device=hits.device)])
    dist.all_reduce(seen, op=dist.ReduceOp.SUM)
    return (seen[0] / seen[1].clamp(min=1)).item()


if __name__ == "__main__":
    main()
