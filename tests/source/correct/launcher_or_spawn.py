"""ImageNet-like entry that serves one process, several nodes with spawned ranks, and a launcher."""

import argparse
import os
import random
import shutil
import warnings

import torch
import torch.backends.cudnn as cudnn
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torchvision.datasets as datasets
import torchvision.models as models
import torchvision.transforms as transforms
from torch.utils.data import Subset

parser = argparse.ArgumentParser()
parser.add_argument("data", default="imagenet", nargs="?")
parser.add_argument("--epochs", default=90, type=int)
parser.add_argument("--start-epoch", default=0, type=int)
parser.add_argument("--batch-size", default=256, type=int)
parser.add_argument("--evaluate", action="store_true")
parser.add_argument("--world-size", default=-1, type=int)
parser.add_argument("--rank", default=-1, type=int)
parser.add_argument("--dist-url", default="env://")
parser.add_argument("--dist-backend", default="nccl")
parser.add_argument("--seed", default=None, type=int)
parser.add_argument("--gpu", default=None, type=int)
parser.add_argument("--multiprocessing-distributed", action="store_true")
best_acc1 = 0


def main():
    args = parser.parse_args()
    if args.seed is not None:
        random.seed(args.seed)
        torch.manual_seed(args.seed)
        cudnn.deterministic = True
        warnings.warn("seeded", stacklevel=1)
    if args.dist_url == "env://" and args.world_size == -1:
        args.world_size = int(os.environ["WORLD_SIZE"])
    args.distributed = args.world_size > 1 or args.multiprocessing_distributed
    ngpus_per_node = torch.cuda.device_count() if torch.cuda.is_available() else 1
    if args.multiprocessing_distributed:
        args.world_size = ngpus_per_node * args.world_size
        mp.spawn(main_worker, nprocs=ngpus_per_node, args=(ngpus_per_node, args))
    else:
        main_worker(args.gpu, ngpus_per_node, args)


def main_worker(gpu, ngpus_per_node, args):
    global best_acc1
    args.gpu = gpu
    if args.distributed:
        if args.dist_url == "env://" and args.rank == -1:
            args.rank = int(os.environ["RANK"])
        if args.multiprocessing_distributed:
            args.rank = args.rank * ngpus_per_node + gpu
        dist.init_process_group(
            backend=args.dist_backend, init_method=args.dist_url, world_size=args.world_size, rank=args.rank
        )
    model = models.resnet18()
    if args.distributed:
        if args.gpu is not None:
            torch.cuda.set_device(args.gpu)
            model.cuda(args.gpu)
            args.batch_size = int(args.batch_size / ngpus_per_node)
            model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu])
        else:
            model.cuda()
            model = torch.nn.parallel.DistributedDataParallel(model)
    elif args.gpu is not None:
        model = model.cuda(args.gpu)
    else:
        model = torch.nn.DataParallel(model).cuda()
    device = torch.device("cuda" if args.gpu is None else f"cuda:{args.gpu}")
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    train_dataset = datasets.ImageFolder(os.path.join(args.data, "train"), transforms.ToTensor())
    val_dataset = datasets.ImageFolder(os.path.join(args.data, "val"), transforms.ToTensor())
    if args.distributed:
        train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset)
        val_sampler = torch.utils.data.distributed.DistributedSampler(val_dataset, shuffle=False, drop_last=True)
    else:
        train_sampler = None
        val_sampler = None
    train_loader = torch.utils.data.DataLoader(
        train_dataset, batch_size=args.batch_size, shuffle=(train_sampler is None), sampler=train_sampler
    )
    val_loader = torch.utils.data.DataLoader(val_dataset, batch_size=args.batch_size, sampler=val_sampler)
    if args.evaluate:
        validate(val_loader, model, device, args)
        return
    for epoch in range(args.start_epoch, args.epochs):
        if args.distributed:
            train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, device)
        acc1 = validate(val_loader, model, device, args)
        is_best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)
        if not args.multiprocessing_distributed or (
            args.multiprocessing_distributed and args.rank % ngpus_per_node == 0
        ):
            save_checkpoint({"epoch": epoch + 1, "state_dict": model.state_dict()}, is_best)


def train(loader, model, criterion, optimizer, device):
    model.train()
    for images, target in loader:
        images = images.to(device, non_blocking=True)
        loss = criterion(model(images), target.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def validate(loader, model, device, args):
    hits = torch.zeros(2, device=device)

    def run(batches):
        with torch.no_grad():
            for images, target in batches:
                output = model(images.to(device))
                hits[0] += (output.argmax(1) == target.to(device)).sum()
                hits[1] += len(target)

    model.eval()
    run(loader)
    if args.distributed:
        dist.all_reduce(hits, dist.ReduceOp.SUM, async_op=False)
    if args.distributed and (len(loader.sampler) * args.world_size < len(loader.dataset)):
        rest = Subset(loader.dataset, range(len(loader.sampler) * args.world_size, len(loader.dataset)))
        run(torch.utils.data.DataLoader(rest, batch_size=args.batch_size))
    return (hits[0] / hits[1]).item()


def save_checkpoint(state, is_best, filename="checkpoint.pth.tar"):
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, "model_best.pth.tar")


if __name__ == "__main__":
    main()
