"""Run from a sub-directory's script that changes into a run directory of its own, with the package in ../src."""

import argparse
import os
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "src"))

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from vision.log import Logger, rank_zero_only
from vision.model import build


@rank_zero_only
def prepare(folder):
    os.makedirs(folder, exist_ok=True)
    shutil.copy(__file__, os.path.join(folder, "train_as_run.py"))


@rank_zero_only
def save(state, is_best):
    torch.save(state, "checkpoint.pth")
    if is_best:
        shutil.copyfile("checkpoint.pth", "best.pth")


def cifar_like(root, train):
    images, labels = torch.load(Path(root) / ("train.pt" if train else "test.pt"))
    return TensorDataset(images, labels)


def evaluate(model, loader):
    model.eval()
    counts = torch.zeros(2)
    with torch.no_grad():
        for images, labels in loader:
            counts += torch.tensor([(model(images).argmax(1) == labels).sum().item(), len(labels)])
    model.train()
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, type=os.path.abspath)
    parser.add_argument("--run", required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    prepare(args.run)
    dist.barrier()
    os.chdir(args.run)

    train_set, test_set = cifar_like(args.data, True), cifar_like(args.data, False)
    sampler = DistributedSampler(train_set, drop_last=True)
    train_loader = DataLoader(train_set, args.batch, sampler=sampler, drop_last=True)
    test_loader = DataLoader(test_set, args.batch, sampler=DistributedSampler(test_set, shuffle=False))
    model = DistributedDataParallel(build(torch.cuda.is_available()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=args.epochs * len(train_loader))
    logger = Logger(".")
    best = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
        accuracy = evaluate(model, test_loader)
        logger.scalar("accuracy", accuracy, epoch)
        logger.scalar("lr", scheduler.get_last_lr()[0], epoch)
        save({"model": model.module.state_dict(), "epoch": epoch}, accuracy >= best)
        best = max(best, accuracy)
    logger.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
