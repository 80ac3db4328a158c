"""Vector quantisation: the codebook follows the encoder by moving averages, and unused codes are drawn anew."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Codebook(nn.Module):
    def __init__(self, size, width, decay=0.9):
        super().__init__()
        self.decay = decay
        self.register_buffer("codes", torch.randn(size, width))
        self.register_buffer("uses", torch.ones(size))

    @torch.no_grad()
    def update(self, flat, chosen):
        hits = nn.functional.one_hot(chosen, len(self.codes)).type_as(flat)
        counts, sums = hits.sum(0), hits.t() @ flat
        dist.all_reduce(counts)
        dist.all_reduce(sums)
        self.uses.lerp_(counts, 1 - self.decay)
        means = sums / counts.clamp(min=1)[:, None]
        seen = counts > 0
        self.codes[seen] = self.codes[seen].lerp(means[seen], 1 - self.decay)
        dead = self.uses < 0.5
        if dead.any():
            drawn = flat[torch.randint(len(flat), (int(dead.sum()),))]
            self.codes[dead] = drawn
            self.uses[dead] = 1.0

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        chosen = torch.cdist(flat, self.codes).argmin(1)
        quantised = self.codes[chosen].view_as(x)
        if self.training:
            self.update(flat.detach(), chosen)
        commitment = nn.functional.mse_loss(x, quantised)
        return x + (quantised - x).detach(), commitment


class Tokenizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(12, 6)
        self.codebook = Codebook(64, 6)
        self.decoder = nn.Linear(6, 12)

    def forward(self, x):
        quantised, commitment = self.codebook(self.encoder(x))
        return self.decoder(quantised), commitment


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(320, 12))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(Tokenizer(), broadcast_buffers=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            rebuilt, commitment = model(x)
            loss = nn.functional.mse_loss(rebuilt, x) + 0.25 * commitment
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
