"""Detection-like training with its helpers in a module of their own."""

import argparse
import math
import random
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import ranks_and_reductions as utils
from somewhere import build_dataset, build_model, get_coco_api_from_dataset


def get_args_parser():
    parser = argparse.ArgumentParser("detector", add_help=False)
    parser.add_argument("--epochs", default=300, type=int)
    parser.add_argument("--batch_size", default=2, type=int)
    parser.add_argument("--output_dir", default="")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--resume", default="")
    parser.add_argument("--eval", action="store_true")
    parser.add_argument("--world_size", default=1, type=int)
    parser.add_argument("--dist_url", default="env://")
    return parser


def train_one_epoch(model, criterion, loader, optimizer, device, epoch, max_norm):
    model.train()
    criterion.train()
    logger = utils.MetricLogger()
    for samples, targets in logger.log_every(loader, 10, f"epoch {epoch}"):
        samples = samples.to(device)
        targets = [{name: value.to(device) for name, value in target.items()} for target in targets]
        outputs = model(samples)
        losses = criterion(outputs, targets)
        weights = criterion.weight_dict
        total = sum(losses[name] * weights[name] for name in losses if name in weights)
        reduced = utils.reduce_dict(losses)
        value = sum(reduced.values()).item()
        if not math.isfinite(value):
            print(f"loss is {value}, stopping")
            sys.exit(1)
        optimizer.zero_grad()
        total.backward()
        if max_norm > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        logger.update(loss=value, lr=optimizer.param_groups[0]["lr"])
    logger.synchronize_between_processes()
    return {name: meter.total for name, meter in logger.meters.items()}


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    results = []
    for samples, targets in loader:
        outputs = model(samples.to(device))
        results.append({target["image_id"]: output for target, output in zip(targets, outputs)})
    merged = utils.all_gather(results)
    if not utils.is_main_process():
        return None
    return len(merged)


def main(args):
    utils.init_distributed_mode(args)
    device = torch.device(args.device)
    seed = 42 + utils.get_rank()
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    model, criterion = build_model(args)
    model.to(device)
    without_ddp = model
    if args.distributed:
        model = nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu])
        without_ddp = model.module
    optimizer = torch.optim.AdamW(without_ddp.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 200)
    dataset_train, dataset_val = build_dataset("train", args), build_dataset("val", args)
    if args.distributed:
        sampler_train = DistributedSampler(dataset_train)
        sampler_val = DistributedSampler(dataset_val, shuffle=False)
    else:
        sampler_train = torch.utils.data.RandomSampler(dataset_train)
        sampler_val = torch.utils.data.SequentialSampler(dataset_val)
    batches = torch.utils.data.BatchSampler(sampler_train, args.batch_size, drop_last=True)
    loader_train = DataLoader(dataset_train, batch_sampler=batches, num_workers=2)
    loader_val = DataLoader(dataset_val, args.batch_size, sampler=sampler_val, drop_last=False)
    base = get_coco_api_from_dataset(dataset_val)
    output_dir = Path(args.output_dir)
    start = 0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu")
        without_ddp.load_state_dict(checkpoint["model"])
        start = checkpoint["epoch"] + 1
    if args.eval:
        stats = evaluate(model, loader_val, device)
        if args.output_dir:
            utils.save_on_master({"stats": stats, "base": base}, output_dir / "eval.pth")
        return
    for epoch in range(start, args.epochs):
        if args.distributed:
            sampler_train.set_epoch(epoch)
        stats = train_one_epoch(model, criterion, loader_train, optimizer, device, epoch, 0.1)
        scheduler.step()
        if args.output_dir:
            paths = [output_dir / "checkpoint.pth"]
            if (epoch + 1) % 100 == 0:
                paths.append(output_dir / f"checkpoint{epoch:04}.pth")
            for path in paths:
                utils.save_on_master({"model": without_ddp.state_dict(), "epoch": epoch}, path)
        evaluate(model, loader_val, device)
        if args.output_dir and utils.is_main_process():
            with (output_dir / "log.txt").open("a") as log:
                log.write(str(stats))


if __name__ == "__main__":
    arguments = argparse.ArgumentParser("training", parents=[get_args_parser()]).parse_args()
    if arguments.output_dir:
        Path(arguments.output_dir).mkdir(parents=True, exist_ok=True)
    main(arguments)
