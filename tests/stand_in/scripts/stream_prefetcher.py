"""Classification with a prefetcher on a side stream, events that time the steps, and bytes normalised on the GPU."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


def fast_collate(batch, memory_format=torch.contiguous_format):
    images, targets = zip(*batch)
    tensor = torch.zeros((len(images), *images[0].shape), dtype=torch.uint8).contiguous(memory_format=memory_format)
    for i, image in enumerate(images):
        tensor[i] += image
    return tensor, torch.tensor(targets, dtype=torch.int64)


class Bytes(Dataset):
    def __len__(self):
        return 320

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randint(256, (3, 16, 16), dtype=torch.uint8, generator=generator), index % 6


class data_prefetcher:
    def __init__(self, loader):
        self.loader = iter(loader)
        self.stream = torch.cuda.Stream()
        self.mean = torch.tensor([123.0, 116.0, 103.0]).cuda().view(1, 3, 1, 1)
        self.std = torch.tensor([58.0, 57.0, 57.0]).cuda().view(1, 3, 1, 1)
        self.preload()

    def preload(self):
        try:
            self.next_input, self.next_target = next(self.loader)
        except StopIteration:
            self.next_input = self.next_target = None
            return
        with torch.cuda.stream(self.stream):
            self.next_input = self.next_input.cuda(non_blocking=True)
            self.next_target = self.next_target.cuda(non_blocking=True)
            self.next_input = self.next_input.float().sub_(self.mean).div_(self.std)

    def next(self):
        torch.cuda.current_stream().wait_stream(self.stream)
        data, target = self.next_input, self.next_target
        if data is not None:
            data.record_stream(torch.cuda.current_stream())
            target.record_stream(torch.cuda.current_stream())
        self.preload()
        return data, target


def reduce_tensor(tensor, world_size):
    rt = tensor.clone()
    dist.all_reduce(rt, op=dist.ReduceOp.SUM)
    rt /= world_size
    return rt


def to_python_float(t):
    return t.item() if hasattr(t, "item") else t[0]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=3, type=int)
    parser.add_argument("-b", "--batch-size", default=16, type=int, help="per GPU")
    parser.add_argument("--lr", default=0.1, type=float)
    parser.add_argument("--print-freq", default=2, type=int)
    parser.add_argument("--channels-last", default=True)
    parser.add_argument("--local_rank", default=os.getenv("LOCAL_RANK", 0), type=int)
    args = parser.parse_args()
    assert torch.backends.cudnn.enabled, "Amp requires cudnn backend to be enabled."
    torch.backends.cudnn.benchmark = True
    args.gpu = args.local_rank
    torch.cuda.set_device(args.gpu)
    dist.init_process_group(backend="nccl", init_method="env://")
    args.world_size = dist.get_world_size()
    memory_format = torch.channels_last if args.channels_last else torch.contiguous_format
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2), nn.GroupNorm(4, 16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 6)
    ).cuda().to(memory_format=memory_format)
    args.lr = args.lr * float(args.batch_size * args.world_size) / 256.0
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scaler = torch.cuda.amp.GradScaler(init_scale=2.0**14, growth_factor=2, backoff_factor=0.5, growth_interval=100)
    ddp_stream = torch.cuda.Stream()
    ddp_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(ddp_stream):
        model = nn.parallel.DistributedDataParallel(
            model, device_ids=[args.gpu], output_device=args.gpu, gradient_as_bucket_view=True
        )
    torch.cuda.current_stream().wait_stream(ddp_stream)
    criterion = nn.CrossEntropyLoss().cuda()
    sampler = DistributedSampler(Bytes())
    loader = DataLoader(Bytes(), batch_size=args.batch_size, num_workers=1, pin_memory=True, sampler=sampler,
                        collate_fn=lambda batch: fast_collate(batch, memory_format))
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train(loader, model, criterion, optimizer, scaler, epoch, args)
    if args.local_rank == 0 and dist.get_rank() == 0:
        torch.save({"state_dict": model.module.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pth.tar")
    dist.destroy_process_group()


def train(loader, model, criterion, optimizer, scaler, epoch, args):
    model.train()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    prefetcher = data_prefetcher(loader)
    data, target = prefetcher.next()
    i = 0
    start.record()
    while data is not None:
        i += 1
        torch.cuda.nvtx.range_push("forward")
        with torch.cuda.amp.autocast():
            loss = criterion(model(data), target)
        torch.cuda.nvtx.range_pop()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if i % args.print_freq == 0:
            reduced = reduce_tensor(loss.data, args.world_size)
            end.record()
            torch.cuda.synchronize()
            if dist.get_rank() == 0:
                took_ms = start.elapsed_time(end) / i
                print(f"[{epoch}] {i}/{len(loader)} {to_python_float(reduced):.3f} {took_ms:.1f} ms a step")
        data, target = prefetcher.next()


if __name__ == "__main__":
    main()
