"""Image training with an averaged copy of the weights, fp16 AMP with a scaler that clips, and a loader that prefetches."""

import argparse
import copy
import logging
import os
from contextlib import suppress

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as NativeDDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

_logger = logging.getLogger("train")


class PrefetchLoader:
    """Copies and normalises the next batch on a stream of its own."""

    def __init__(self, loader, mean, std, device, fp16=False):
        self.loader, self.device, self.fp16 = loader, device, fp16
        dtype = torch.float16 if fp16 else torch.float32
        self.mean = torch.tensor([255 * x for x in mean], device=device, dtype=dtype).view(1, -1, 1, 1)
        self.std = torch.tensor([255 * x for x in std], device=device, dtype=dtype).view(1, -1, 1, 1)
        self.is_cuda = torch.cuda.is_available() and device.type == "cuda"

    def __iter__(self):
        first = True
        stream = torch.cuda.Stream(device=self.device) if self.is_cuda else None
        context = (lambda: torch.cuda.stream(stream)) if self.is_cuda else suppress
        for next_input, next_target in self.loader:
            with context():
                next_input = next_input.to(device=self.device, non_blocking=True)
                next_target = next_target.to(device=self.device, non_blocking=True)
                next_input = next_input.float().sub_(self.mean).div_(self.std)
            if not first:
                yield batch, target
            else:
                first = False
            if stream is not None:
                torch.cuda.current_stream(device=self.device).wait_stream(stream)
            batch, target = next_input, next_target
        yield batch, target

    def __len__(self):
        return len(self.loader)

    @property
    def sampler(self):
        return self.loader.sampler


class ModelEma(nn.Module):
    def __init__(self, model, decay=0.99):
        super().__init__()
        self.module = copy.deepcopy(model)
        self.module.eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for kept, new in zip(self.module.state_dict().values(), model.state_dict().values()):
            if kept.is_floating_point():
                kept.lerp_(new.to(kept.dtype), 1.0 - self.decay)
            else:
                kept.copy_(new)


class NativeScaler:
    def __init__(self):
        self._scaler = torch.cuda.amp.GradScaler()

    def __call__(self, loss, optimizer, parameters, clip_grad, need_update=True):
        self._scaler.scale(loss).backward()
        if need_update:
            self._scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
            self._scaler.step(optimizer)
            self._scaler.update()

    def state_dict(self):
        return self._scaler.state_dict()


def reduce_tensor(tensor, n):
    reduced = tensor.clone()
    dist.all_reduce(reduced, op=dist.ReduceOp.SUM)
    return reduced / n


def create_loader(dataset, batch_size, is_training, device):
    sampler = DistributedSampler(dataset, shuffle=is_training)
    loader = DataLoader(
        dataset, batch_size=batch_size, sampler=sampler, num_workers=1, pin_memory=True, drop_last=is_training
    )
    return PrefetchLoader(loader, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25), device)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--grad-accum-steps", type=int, default=2)
    parser.add_argument("--output", default="output")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    args.local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(args.local_rank)
    dist.init_process_group(backend="nccl", init_method="env://")
    args.rank, args.world_size = dist.get_rank(), dist.get_world_size()
    args.device = torch.device("cuda", args.local_rank)
    if args.rank == 0:
        _logger.info("training on %d GPUs", args.world_size)
        os.makedirs(args.output, exist_ok=True)
    torch.manual_seed(42 + args.rank)

    model = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.GroupNorm(4, 16), nn.SiLU(), nn.AdaptiveAvgPool2d(1))
    model.append(nn.Flatten()).append(nn.Linear(16, 5))
    model = model.to(device=args.device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, alpha=0.9)
    model_ema = ModelEma(model)
    model = NativeDDP(model, device_ids=[args.device], gradient_as_bucket_view=True)
    amp_autocast, loss_scaler = torch.cuda.amp.autocast, NativeScaler()
    images = torch.randint(0, 256, (320, 3, 20, 20), dtype=torch.uint8)
    dataset = TensorDataset(images, torch.arange(320) % 5)
    loader_train = create_loader(dataset, 16, True, args.device)
    loader_eval = create_loader(dataset, 16, False, args.device)
    for epoch in range(args.epochs):
        loader_train.sampler.set_epoch(epoch)
        model.train()
        optimizer.zero_grad()
        for i, (x, target) in enumerate(loader_train):
            need_update = (i + 1) % args.grad_accum_steps == 0 or i + 1 == len(loader_train)
            with model.no_sync() if not need_update else suppress():
                with amp_autocast():
                    loss = nn.functional.cross_entropy(model(x), target) / args.grad_accum_steps
                loss_scaler(loss, optimizer, model.parameters(), 1.0, need_update)
            if need_update:
                optimizer.zero_grad()
                torch.cuda.synchronize()
                model_ema.update(model.module)
        accuracy = validate(model_ema.module, loader_eval, args, amp_autocast)
        if args.rank == 0:
            _logger.info("epoch %d accuracy %.3f", epoch, accuracy)
            torch.save({"ema": model_ema.module.state_dict(), "scaler": loss_scaler.state_dict()},
                       os.path.join(args.output, f"checkpoint-{epoch}.pth.tar"))
    dist.destroy_process_group()


@torch.no_grad()
def validate(model, loader, args, amp_autocast):
    hits = torch.zeros(1, device=args.device)
    for x, target in loader:
        with amp_autocast():
            hits += (model(x).argmax(1) == target).float().mean()
    return reduce_tensor(hits / len(loader), args.world_size).item()


if __name__ == "__main__":
    main()
