"""A codec whose codes follow the samples of all ranks; the statistics of its norm are each rank's own."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class EuclideanCodebook(nn.Module):
    def __init__(self, width, size, decay=0.99):
        super().__init__()
        self.decay, self.size = decay, size
        embed = torch.randn(size, width)
        self.register_buffer("embed", embed)
        self.register_buffer("embed_avg", embed.clone())
        self.register_buffer("cluster_size", torch.ones(size))

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        index = torch.cdist(flat, self.embed).argmin(-1)
        quantize = nn.functional.embedding(index, self.embed).view_as(x)
        if self.training:
            onehot = nn.functional.one_hot(index, self.size).type(x.dtype)
            counts, sums = onehot.sum(0), onehot.t() @ flat.detach()
            dist.all_reduce(counts)
            dist.all_reduce(sums)
            self.cluster_size.mul_(self.decay).add_(counts, alpha=1 - self.decay)
            self.embed_avg.mul_(self.decay).add_(sums, alpha=1 - self.decay)
            smoothed = (self.cluster_size + 1e-5) / (self.cluster_size.sum() + self.size * 1e-5)
            smoothed = smoothed * self.cluster_size.sum()
            self.embed.data.copy_(self.embed_avg / smoothed.unsqueeze(1))
        return quantize


class Codec(nn.Module):
    def __init__(self, stages=2):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(24, 8), nn.BatchNorm1d(8))
        self.decoder = nn.Linear(8, 24)
        self.stages = nn.ModuleList(EuclideanCodebook(8, 32) for _ in range(stages))

    def forward(self, x):
        z = self.encoder(x)
        residual, total, commit = z, torch.zeros_like(z), 0.0
        for stage in self.stages:
            quantized = stage(residual)
            commit = commit + nn.functional.mse_loss(residual, quantized.detach())
            residual, total = residual - quantized.detach(), total + quantized
        return self.decoder(z + (total - z).detach()), commit


def train_one_step(epoch, codec, optimizer, loader):
    for (wave,) in loader:
        optimizer.zero_grad()
        out, commit = codec(wave)
        (nn.functional.l1_loss(out, wave) + commit).backward()
        optimizer.step()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(320, 24))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    codec = DDP(Codec(), broadcast_buffers=False)
    optimizer = torch.optim.Adam(codec.parameters(), lr=3e-4)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        train_one_step(epoch, codec, optimizer, loader)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
