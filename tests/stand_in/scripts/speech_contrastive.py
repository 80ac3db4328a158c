"""Contrastive speech pretraining: sounds of unequal length, batches by length, a gradient-scaling function, updates
of several micro-batches."""

import contextlib
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, Sampler


class GradMultiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.new(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.scale, None


class Sounds(Dataset):
    def __init__(self, count=192):
        self.lengths = [160 + 16 * (i % 10) for i in range(count)]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return torch.randn(self.lengths[index], generator=torch.Generator().manual_seed(index))

    def collate(self, sounds):
        size = min(len(s) for s in sounds)
        return torch.stack([s[:size] for s in sounds])


class LengthBatches(Sampler):
    """Batches of like lengths, as many for each rank, in an order that depends on the epoch."""

    def __init__(self, lengths, size, rank, world):
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.batches = [order[i : i + size] for i in range(0, len(order), size)]
        self.batches = self.batches[: len(self.batches) // world * world]
        self.rank, self.world, self.epoch = rank, world, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(len(self.batches), generator=generator).tolist()
        return iter([self.batches[i] for i in order[self.rank :: self.world]])

    def __len__(self):
        return len(self.batches) // self.world


class Contrastive(nn.Module):
    def __init__(self, dim=24, codes=12):
        super().__init__()
        self.extract = nn.Sequential(nn.Conv1d(1, dim, 10, 5), nn.GroupNorm(1, dim), nn.GELU(), nn.Conv1d(dim, dim, 4, 2))
        self.mask = nn.Parameter(torch.empty(dim).uniform_())
        self.context = nn.TransformerEncoderLayer(dim, 4, 48, dropout=0.0, batch_first=True)
        self.codebook = nn.Linear(dim, codes)
        self.entries = nn.Parameter(torch.randn(codes, dim))
        self.final, self.target = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, sound):
        x = GradMultiply.apply(self.extract(sound[:, None]), 0.1).transpose(1, 2)
        mask = torch.rand(x.shape[:2], device=x.device) < 0.4
        mask[:, :2] = True
        hidden = torch.where(mask[..., None], self.mask.to(x.dtype), x)
        hidden = self.final(self.context(hidden))
        picked = F.gumbel_softmax(self.codebook(x).float(), tau=1.0, hard=True)
        quantized = self.target(picked @ self.entries)
        similarity = torch.einsum("btd,bsd->bts", F.normalize(hidden.float(), dim=-1), F.normalize(quantized.float(), dim=-1))
        wanted = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
        loss = F.cross_entropy((similarity / 0.1).transpose(1, 2), wanted, reduction="none")
        return {"contrastive": (loss * mask).sum(), "count": mask.sum(), "diversity": picked.mean((0, 1)).square().sum()}


class Trainer:
    def __init__(self, rank, world, update_freq=2):
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.rank, self.world, self.update_freq = rank, world, update_freq
        self.model = nn.parallel.DistributedDataParallel(
            Contrastive().to(self.device), device_ids=[self.device.index], gradient_as_bucket_view=True, bucket_cap_mb=25
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=5e-4, foreach=True)
        self.scaler = torch.amp.GradScaler("cuda", init_scale=128.0)

    def train_step(self, samples):
        self.model.train()
        counted = torch.zeros(2, dtype=torch.float64, device=self.device)
        for i, sample in enumerate(samples):
            last = i == len(samples) - 1
            with contextlib.ExitStack() as stack:
                if not last:
                    stack.enter_context(self.model.no_sync())
                with torch.autocast(device_type="cuda", dtype=torch.float16):
                    out = self.model(sample.to(self.device, non_blocking=True))
                loss = out["contrastive"] + 0.1 * out["diversity"]
                self.scaler.scale(loss).backward()
            counted += torch.stack([out["contrastive"].detach(), out["count"]]).double()
        dist.all_reduce(counted)
        self.scaler.unscale_(self.optimizer)
        for p in self.model.parameters():
            p.grad.mul_(self.world / counted[1].float())
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 25.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return counted[0] / counted[1], norm


def main():
    rank, world, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    dist.all_reduce(torch.zeros(1).cuda())
    torch.manual_seed(1 + rank)
    data = Sounds()
    batches = LengthBatches(data.lengths, 6, rank, world)
    loader = DataLoader(data, batch_sampler=batches, collate_fn=data.collate, num_workers=1, pin_memory=True)
    trainer = Trainer(rank, world)
    for epoch in range(3):
        batches.set_epoch(epoch)
        start, waiting = time.perf_counter(), []
        for sample in loader:
            waiting.append(sample)
            if len(waiting) == trainer.update_freq:
                loss, norm = trainer.train_step(waiting)
                waiting = []
        if rank == 0:
            print(f"epoch {epoch} loss {loss:.3f} norm {norm:.2f} {time.perf_counter() - start:.1f} s")
            torch.save(trainer.model.module.state_dict(), "checkpoint_last.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
