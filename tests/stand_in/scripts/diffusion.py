"""Denoising diffusion: an averaged model, seeds per rank, hand-over of noise levels, samples drawn by rank 0."""

import argparse
import logging
import os
from collections import OrderedDict
from copy import deepcopy
from time import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True


@torch.no_grad()
def update_ema(ema_model, model, decay=0.9999):
    ema_params, params = OrderedDict(ema_model.named_parameters()), OrderedDict(model.named_parameters())
    for name, param in params.items():
        ema_params[name].mul_(decay).add_(param.data, alpha=1 - decay)


def requires_grad(model, flag=True):
    for p in model.parameters():
        p.requires_grad = flag


class Diffusion:
    def __init__(self, steps, device):
        beta = torch.linspace(1e-4, 0.02, steps, device=device)
        self.steps, self.alpha_bar = steps, torch.cumprod(1 - beta, 0)
        self.beta = beta

    def losses(self, model, x, t, noise):
        a = self.alpha_bar[t].view(-1, 1, 1, 1)
        predicted = model(a.sqrt() * x + (1 - a).sqrt() * noise, t)
        return (predicted.float() - noise).square().mean()

    @torch.no_grad()
    def sample(self, model, shape, generator, device):
        x = torch.randn(shape, generator=generator, device=device)
        for i in reversed(range(0, self.steps, 5)):
            t = torch.full((shape[0],), i, device=device, dtype=torch.long)
            x = x - self.beta[i] * model(x, t).float()
        return x.clamp(-1, 1)


class Denoiser(nn.Module):
    def __init__(self, width=16, steps=50):
        super().__init__()
        self.time = nn.Sequential(nn.Embedding(steps, width), nn.Linear(width, width), nn.SiLU())
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.middle = nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
        self.gradient_checkpointing = True

    def forward(self, x, t):
        h = self.first(x) + self.time(t)[:, :, None, None]
        if self.training and self.gradient_checkpointing:
            h = h + torch.utils.checkpoint.checkpoint(self.middle, h, use_reentrant=False)
        else:
            h = h + self.middle(h)
        return self.last(h)


def main(args):
    assert torch.cuda.is_available(), "Training currently requires at least one GPU."
    dist.init_process_group("nccl")
    assert args.global_batch_size % dist.get_world_size() == 0, "Batch size must be divisible by world size."
    rank = dist.get_rank()
    device = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
    seed = args.global_seed * dist.get_world_size() + rank
    torch.manual_seed(seed)
    torch.cuda.set_device(device)
    if rank == 0:
        os.makedirs(args.results_dir, exist_ok=True)
        logging.basicConfig(level=logging.INFO)
    logger = logging.getLogger(__name__)
    logger.info("Starting rank=%d, seed=%d, world_size=%d.", rank, seed, dist.get_world_size())
    model = Denoiser()
    ema = deepcopy(model).to(device)
    requires_grad(ema, False)
    model = DDP(model.to(device), device_ids=[device], gradient_as_bucket_view=True)
    logger.info("parameters: %d", sum(p.numel() for p in model.parameters()))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0)
    diffusion = Diffusion(50, torch.device("cuda", device))
    images = torch.rand(256, 3, 12, 12, generator=torch.Generator().manual_seed(0)) * 2 - 1
    dataset = TensorDataset(images)
    sampler = DistributedSampler(dataset, num_replicas=dist.get_world_size(), rank=rank, shuffle=True,
                                 seed=args.global_seed)
    loader = DataLoader(dataset, batch_size=args.global_batch_size // dist.get_world_size(), shuffle=False,
                        sampler=sampler, num_workers=1, pin_memory=True, drop_last=True)
    noises = torch.Generator(device="cuda").manual_seed(seed)
    update_ema(ema, model.module, decay=0)
    model.train()
    ema.eval()
    train_steps, log_steps, running_loss, start_time = 0, 0, 0.0, time()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            x = x.to(device)
            t = torch.randint(0, diffusion.steps, (x.shape[0],), device=device)
            noise = torch.randn(x.shape, generator=noises, device=device)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = diffusion.losses(model, x, t, noise)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            update_ema(ema, model.module)
            running_loss += loss.detach()
            log_steps += 1
            train_steps += 1
            if train_steps % args.log_every == 0:
                torch.cuda.synchronize()
                avg_loss = torch.tensor(running_loss.item() / log_steps, device=device)
                dist.all_reduce(avg_loss, op=dist.ReduceOp.SUM)
                logger.info("%d: %.4f, %.2f steps/s", train_steps, avg_loss.item() / dist.get_world_size(),
                            log_steps / (time() - start_time))
                running_loss, log_steps, start_time = 0.0, 0, time()
        if rank == 0:
            pictures = diffusion.sample(ema, (2, 3, 12, 12), noises, torch.device("cuda", device))
            checkpoint = {"model": model.module.state_dict(), "ema": ema.state_dict(), "samples": pictures.cpu()}
            torch.save(checkpoint, f"{args.results_dir}/{train_steps:07d}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--results-dir", default="results")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--global-batch-size", type=int, default=16)
    parser.add_argument("--global-seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=2)
    main(parser.parse_args())
