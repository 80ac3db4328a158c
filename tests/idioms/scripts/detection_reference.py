"""Grouped batches from an own batch sampler, losses in a dict, objects gathered for the evaluation."""

import argparse
import math
import os
import sys
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, SequentialSampler


class Scenes(Dataset):
    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        self.wide = torch.rand(size, generator=generator) > 0.5
        self.pixels = torch.randn(size, 3, 8, 16, generator=generator)

    def __len__(self):
        return len(self.wide)

    def __getitem__(self, index):
        image = self.pixels[index] if self.wide[index] else self.pixels[index].transpose(1, 2)
        return image, {"image_id": index, "label": int(self.wide[index]), "box": image.mean((1, 2)).repeat(2)[:4]}


class GroupedBatchSampler(BatchSampler):
    """Batches of one aspect ratio each, in the order of the sampler beneath."""

    def __init__(self, sampler, group_ids, batch_size):
        self.sampler, self.group_ids, self.batch_size = sampler, group_ids, batch_size

    def __iter__(self):
        buffers, samples = defaultdict(list), defaultdict(list)
        batches = 0
        for idx in self.sampler:
            group = self.group_ids[idx]
            buffers[group].append(idx)
            samples[group].append(idx)
            if len(buffers[group]) == self.batch_size:
                yield buffers[group]
                batches += 1
                del buffers[group]
        # Every rank yields the same number of batches: what is left is filled up with repeats.
        for group in sorted(samples):
            if batches == len(self):
                return
            rest = buffers.get(group, [])
            yield (rest + samples[group] * self.batch_size)[: self.batch_size]
            batches += 1
        while batches < len(self):
            group = max(samples, key=lambda g: len(samples[g]))
            yield (samples[group] * self.batch_size)[: self.batch_size]
            batches += 1

    def __len__(self):
        return len(self.sampler) // self.batch_size


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.classifier = nn.Linear(8, 2)
        self.regressor = nn.Linear(8, 4)

    def forward(self, images, targets=None):
        features = self.backbone(torch.stack(images)).flatten(1)
        logits, boxes = self.classifier(features), self.regressor(features)
        if targets is None:
            return [{"label": lo.argmax().item(), "box": b.tolist()} for lo, b in zip(logits, boxes, strict=True)]
        labels = torch.tensor([t["label"] for t in targets])
        return {
            "loss_classifier": nn.functional.cross_entropy(logits, labels),
            "loss_box_reg": nn.functional.smooth_l1_loss(boxes, torch.stack([t["box"] for t in targets])),
        }


def get_world_size():
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def reduce_dict(input_dict, average=True):
    """Reduce the values of a dict from all ranks, in the order of the sorted keys."""
    world_size = get_world_size()
    if world_size < 2:
        return input_dict
    with torch.inference_mode():
        names = sorted(input_dict.keys())
        values = torch.stack([input_dict[k] for k in names], dim=0)
        dist.all_reduce(values)
        if average:
            values /= world_size
        return dict(zip(names, values, strict=True))


def all_gather(data):
    world_size = get_world_size()
    if world_size == 1:
        return [data]
    data_list = [None] * world_size
    dist.all_gather_object(data_list, data)
    return data_list


def train_one_epoch(model, optimizer, data_loader, epoch, print_freq):
    model.train()
    lr_scheduler = None
    if epoch == 0:
        warmup_iters = min(1000, len(data_loader) - 1)
        lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / 1000, total_iters=warmup_iters)
    for step, (images, targets) in enumerate(data_loader):
        loss_dict = model(list(images), targets)
        losses = sum(loss for loss in loss_dict.values())
        loss_dict_reduced = reduce_dict(loss_dict)
        loss_value = sum(loss for loss in loss_dict_reduced.values()).item()
        if not math.isfinite(loss_value):
            print(f"Loss is {loss_value}, stopping training")
            sys.exit(1)
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
        if lr_scheduler is not None:
            lr_scheduler.step()
        if step % print_freq == 0 and dist.get_rank() == 0:
            print(f"Epoch [{epoch}] {step} loss {loss_value:.4f}")


@torch.inference_mode()
def evaluate(model, data_loader):
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model.eval()
    results = {}
    for images, targets in data_loader:
        outputs = model.module(list(images))
        results.update({t["image_id"]: o["label"] == t["label"] for t, o in zip(targets, outputs, strict=True)})
    merged = {}
    for part in all_gather(results):
        merged.update(part)
    torch.set_num_threads(n_threads)
    return sum(merged.values()) / len(merged)


def collate_fn(batch):
    return tuple(zip(*batch, strict=True))


def main(args):
    if args.output_dir:
        os.makedirs(args.output_dir, exist_ok=True)
    dist.init_process_group("gloo")
    dataset, dataset_test = Scenes(128, 0), Scenes(40, 1)
    if args.distributed:
        train_sampler = DistributedSampler(dataset)
        test_sampler = DistributedSampler(dataset_test, shuffle=False)
    else:
        train_sampler, test_sampler = torch.utils.data.RandomSampler(dataset), SequentialSampler(dataset_test)
    batches = GroupedBatchSampler(train_sampler, dataset.wide.int().tolist(), args.batch_size)
    data_loader = DataLoader(dataset, batch_sampler=batches, num_workers=args.workers, collate_fn=collate_fn)
    data_loader_test = DataLoader(dataset_test, batch_size=1, sampler=test_sampler, collate_fn=collate_fn)

    model = Detector()
    model_without_ddp = model
    if args.distributed:
        model = nn.parallel.DistributedDataParallel(model)
        model_without_ddp = model.module
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.02, momentum=0.9)
    lr_scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 2], gamma=0.1)
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu", weights_only=True)
        model_without_ddp.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        lr_scheduler.load_state_dict(checkpoint["lr_scheduler"])
        args.start_epoch = checkpoint["epoch"] + 1
    for epoch in range(args.start_epoch, args.epochs):
        if args.distributed:
            train_sampler.set_epoch(epoch)
        train_one_epoch(model, optimizer, data_loader, epoch, print_freq=5)
        lr_scheduler.step()
        if args.output_dir and dist.get_rank() == 0:
            checkpoint = {"model": model_without_ddp.state_dict(), "epoch": epoch, "args": vars(args)}
            checkpoint |= {"optimizer": optimizer.state_dict(), "lr_scheduler": lr_scheduler.state_dict()}
            torch.save(checkpoint, os.path.join(args.output_dir, f"model_{epoch}.pth"))
        evaluate(model, data_loader_test)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Detection training")
    parser.add_argument("-b", "--batch-size", default=4, type=int)
    parser.add_argument("--epochs", default=3, type=int)
    parser.add_argument("--workers", default=1, type=int)
    parser.add_argument("--resume", default="", type=str)
    parser.add_argument("--start_epoch", default=0, type=int)
    parser.add_argument("--output-dir", default=".", type=str)
    args = parser.parse_args()
    args.distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1
    main(args)
