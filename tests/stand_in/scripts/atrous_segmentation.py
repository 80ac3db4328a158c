"""Dilated convolutions, a polynomial rate per iteration, a group of its own for metrics and a weighted sampler."""

import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BASE_LR, CLASSES, EPOCHS = 0.02, 5, 3


class ASPP(nn.Module):
    def __init__(self, inside, outside, rates=(1, 2, 4)):
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Conv2d(inside, outside, 3, padding=r, dilation=r, bias=False), nn.SyncBatchNorm(outside))
            for r in rates
        )
        self.project = nn.Conv2d(outside * len(rates), outside, 1)

    def forward(self, x):
        return self.project(torch.cat([F.relu(branch(x)) for branch in self.branches], dim=1))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.low = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU())
        self.aspp = ASPP(8, 8)
        self.classify = nn.Conv2d(16, CLASSES, 1)

    def forward(self, x):
        low = self.low(x)
        y = self.classify(torch.cat([low, self.aspp(low)], dim=1))
        return F.interpolate(y, size=x.shape[-2:], mode="bilinear", align_corners=False)


class FocalLoss(nn.Module):
    def __init__(self, gamma=2.0):
        super().__init__()
        self.gamma = gamma
        self.register_buffer("weight", torch.ones(CLASSES))

    def forward(self, logits, target):
        ce = F.cross_entropy(logits, target, weight=self.weight, reduction="none", ignore_index=254)
        return ((1 - torch.exp(-ce)) ** self.gamma * ce).mean()


def seed_worker(worker):
    random.seed(torch.initial_seed() % 2**32)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device(f"cuda:{local_rank}")
    dist.init_process_group(backend="cpu:gloo,cuda:nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    metrics = dist.new_group(ranks=list(range(world)), backend="nccl")
    torch.set_default_device(device)
    model = Network()
    criterion = FocalLoss()
    torch.set_default_device(None)
    torch.backends.cudnn.enabled = True
    torch.cuda.empty_cache()
    model = DistributedDataParallel(
        model, device_ids=[local_rank], output_device=local_rank, broadcast_buffers=True, gradient_as_bucket_view=True
    )
    optimizer = torch.optim.SGD(model.parameters(), BASE_LR, momentum=0.9, weight_decay=5e-4, nesterov=True)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(200, 3, 17, 17, generator=generator), torch.randint(CLASSES, (200, 17, 17), generator=generator)
    )
    sampler = DistributedSampler(data, seed=3)
    loader = DataLoader(data, batch_size=10, sampler=sampler, num_workers=2, pin_memory=True, persistent_workers=True,
                        worker_init_fn=seed_worker)
    held_out = DataLoader(data, batch_size=10, sampler=DistributedSampler(data, shuffle=False), pin_memory=True)
    total = EPOCHS * len(loader)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for i, (image, target) in enumerate(loader):
            for group in optimizer.param_groups:
                group["lr"] = BASE_LR * (1 - (epoch * len(loader) + i) / total) ** 0.9
            image, target = image.to(device, non_blocking=True), target.to(device, non_blocking=True)
            with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
                loss = criterion(model(image), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        counts = torch.zeros(2, CLASSES, device=device)
        with torch.no_grad():
            for image, target in held_out:
                predicted = model(image.cuda(non_blocking=True)).argmax(1)
                target = target.cuda(non_blocking=True)
                for c in range(CLASSES):
                    counts[0, c] += ((predicted == c) & (target == c)).sum()
                    counts[1, c] += ((predicted == c) | (target == c)).sum()
        share = torch.empty(2 * CLASSES // world, device=device)
        dist.reduce_scatter_tensor(share, counts.flatten()[: len(share) * world].contiguous(), group=metrics)
        gathered = [torch.empty_like(share) for _ in range(world)]
        dist.all_gather(gathered, share, group=metrics)
        overlap, union = torch.cat(gathered).view(2, -1)
        if rank == 0:
            print(f"epoch {epoch}: mean IoU {(overlap / union.clamp(min=1)).mean().item():.3f}")
            torch.save({"state": model.module.state_dict(), "epoch": epoch}, f"epoch-{epoch}.pth")
    dist.destroy_process_group(metrics)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
