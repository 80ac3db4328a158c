"""Classifier trained under torchrun: sharded loader, set_epoch, metric reduced, rank 0 saves and resumes."""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    def __init__(self, width=32, classes=10):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, width), nn.BatchNorm1d(width), nn.ReLU())
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.body(x))


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def setup():
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    if use_cuda:
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def make_data(samples, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 16, generator=generator)
    y = torch.randint(0, 10, (samples,), generator=generator)
    return TensorDataset(x, y)


def make_loader(dataset, batch_size, train):
    sampler = DistributedSampler(dataset, shuffle=train, drop_last=train)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, num_workers=2, pin_memory=True)


def train_one_epoch(model, loader, optimizer, device, epoch):
    model.train()
    loader.sampler.set_epoch(epoch)
    total = torch.zeros(2, device=device)
    for step, (x, y) in enumerate(loader):
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += torch.tensor([loss.item() * len(x), len(x)], device=device)
        if step % 50 == 0 and dist.get_rank() == 0:
            print(f"epoch {epoch} step {step} loss {loss.item():.3f}")
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    counts = torch.zeros(2, device=device)
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        hits = (model.module(x).argmax(1) == y).sum()
        counts += torch.stack([hits, torch.tensor(len(y), device=device)])
    dist.all_reduce(counts, op=dist.ReduceOp.SUM)
    return (counts[0] / counts[1]).item()


def save(path, model, optimizer, epoch):
    if dist.get_rank() == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(state, path + ".tmp")
        os.replace(path + ".tmp", path)
    dist.barrier()


def main():
    args = parse_args()
    device = setup()
    torch.manual_seed(0)
    model = DDP(Net().to(device), device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    train_loader = make_loader(make_data(4096, 1), args.batch_size, True)
    val_loader = make_loader(make_data(512, 2), args.batch_size, False)
    first = 0
    if args.resume:
        state = torch.load(args.checkpoint, map_location=device)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1
    best = 0.0
    for epoch in range(first, args.epochs):
        started = time.time()
        loss = train_one_epoch(model, train_loader, optimizer, device, epoch)
        accuracy = evaluate(model, val_loader, device)
        if accuracy > best:
            best = accuracy
            save(args.checkpoint, model, optimizer, epoch)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.3f} accuracy {accuracy:.3f} in {time.time() - started:.1f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
