"""Masked autoencoding with accumulation over iterations, a scaler object that hides the backward, and a log file."""

import argparse
import datetime
import json
import math
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torch.utils.tensorboard import SummaryWriter


def get_args_parser():
    parser = argparse.ArgumentParser("masked pre-training", add_help=False)
    parser.add_argument("--batch_size", default=8, type=int)
    parser.add_argument("--epochs", default=3, type=int)
    parser.add_argument("--accum_iter", default=2, type=int)
    parser.add_argument("--mask_ratio", default=0.75, type=float)
    parser.add_argument("--blr", type=float, default=1e-3)
    parser.add_argument("--warmup_epochs", type=int, default=1)
    parser.add_argument("--output_dir", default="./output_dir")
    parser.add_argument("--log_dir", default="./output_dir")
    parser.add_argument("--resume", default="")
    parser.add_argument("--dist_url", default="env://")
    return parser


class MaskedAutoencoder(nn.Module):
    def __init__(self, patches=16, dim=24):
        super().__init__()
        self.patch_embed = nn.Linear(12, dim)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, patches, dim), requires_grad=False)
        self.encoder = nn.TransformerEncoderLayer(dim, 2, 48, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerEncoderLayer(dim, 2, 48, dropout=0.0, batch_first=True)
        self.head = nn.Linear(dim, 12)

    def forward(self, patches, mask_ratio):
        tokens = self.patch_embed(patches) + self.pos_embed
        count = tokens.size(1)
        keep = int(count * (1 - mask_ratio))
        order = torch.rand(tokens.shape[:2]).argsort(dim=1)
        restore = order.argsort(dim=1)
        kept = torch.gather(tokens, 1, order[:, :keep, None].expand(-1, -1, tokens.size(2)))
        latent = self.encoder(kept)
        filled = torch.cat([latent, self.mask_token.expand(len(latent), count - keep, -1)], dim=1)
        filled = torch.gather(filled, 1, restore[:, :, None].expand(-1, -1, tokens.size(2))) + self.pos_embed
        loss = (self.head(self.decoder(filled)) - patches).pow(2).mean(dim=-1)
        mask = (restore >= keep).float()
        return (loss * mask).sum() / mask.sum()


class NativeScaler:
    """Backward, clipping and step in one call; the scaler does nothing without CUDA."""

    def __init__(self):
        self._scaler = torch.amp.GradScaler("cuda", enabled=torch.cuda.is_available())

    def __call__(self, loss, optimizer, clip_grad=None, parameters=None, update_grad=True):
        self._scaler.scale(loss).backward()
        if update_grad:
            self._scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters, clip_grad or 1e9)
            self._scaler.step(optimizer)
            self._scaler.update()


def adjust_learning_rate(optimizer, epoch, args):
    if epoch < args.warmup_epochs:
        lr = args.lr * epoch / args.warmup_epochs
    else:
        progress = (epoch - args.warmup_epochs) / (args.epochs - args.warmup_epochs)
        lr = args.lr * 0.5 * (1.0 + math.cos(math.pi * progress))
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    return lr


def all_reduce_mean(x):
    world_size = dist.get_world_size()
    if world_size > 1:
        x_reduce = torch.tensor(x)
        dist.all_reduce(x_reduce)
        x_reduce /= world_size
        return x_reduce.item()
    return x


def train_one_epoch(model, data_loader, optimizer, epoch, loss_scaler, log_writer, args):
    model.train(True)
    accum_iter = args.accum_iter
    optimizer.zero_grad()
    total, count = 0.0, 0
    for data_iter_step, (samples,) in enumerate(data_loader):
        update_grad = (data_iter_step + 1) % accum_iter == 0
        if data_iter_step % accum_iter == 0:
            adjust_learning_rate(optimizer, data_iter_step / len(data_loader) + epoch, args)
        with nullcontext() if update_grad else model.no_sync():
            with torch.amp.autocast("cpu", dtype=torch.bfloat16):
                loss = model(samples, mask_ratio=args.mask_ratio)
            loss_value = loss.item()
            if not math.isfinite(loss_value):
                print(f"Loss is {loss_value}, stopping training")
                sys.exit(1)
            loss_scaler(loss / accum_iter, optimizer, parameters=model.parameters(), update_grad=update_grad)
        if update_grad:
            optimizer.zero_grad()
            loss_value_reduce = all_reduce_mean(loss_value)
            total, count = total + loss_value_reduce, count + 1
            if log_writer is not None:
                epoch_1000x = int((data_iter_step / len(data_loader) + epoch) * 1000)
                log_writer.add_scalar("train_loss", loss_value_reduce, epoch_1000x)
    return {"train_loss": total / max(count, 1)}


def main(args):
    dist.init_process_group("gloo", init_method=args.dist_url, timeout=datetime.timedelta(minutes=5))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    generator = torch.Generator().manual_seed(0)
    dataset_train = TensorDataset(torch.randn(320, 16, 12, generator=generator))
    sampler_train = DistributedSampler(dataset_train, num_replicas=world_size, rank=rank, shuffle=True)
    data_loader_train = DataLoader(dataset_train, sampler=sampler_train, batch_size=args.batch_size, drop_last=True)
    log_writer = None
    if rank == 0 and args.log_dir is not None:
        os.makedirs(args.log_dir, exist_ok=True)
        log_writer = SummaryWriter(log_dir=args.log_dir)

    args.lr = args.blr * args.batch_size * args.accum_iter * world_size / 256
    model = nn.parallel.DistributedDataParallel(MaskedAutoencoder())
    model_without_ddp = model.module
    optimizer = torch.optim.AdamW(model_without_ddp.parameters(), lr=args.lr, betas=(0.9, 0.95))
    loss_scaler = NativeScaler()
    start_time = time.time()
    for epoch in range(args.epochs):
        data_loader_train.sampler.set_epoch(epoch)
        train_stats = train_one_epoch(model, data_loader_train, optimizer, epoch, loss_scaler, log_writer, args)
        if args.output_dir and rank == 0:
            if epoch % 20 == 0 or epoch + 1 == args.epochs:
                torch.save({"model": model_without_ddp.state_dict(), "epoch": epoch}, f"{args.output_dir}/{epoch}.pth")
            log_writer.flush()
            with open(os.path.join(args.output_dir, "log.txt"), mode="a", encoding="utf-8") as f:
                f.write(json.dumps({**train_stats, "epoch": epoch}) + "\n")
    total = datetime.timedelta(seconds=int(time.time() - start_time))
    print(f"Training time {total}")
    dist.destroy_process_group()


if __name__ == "__main__":
    args = get_args_parser().parse_args()
    if args.output_dir:
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    main(args)
