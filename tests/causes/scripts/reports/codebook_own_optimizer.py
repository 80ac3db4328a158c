"""Vector quantisation: the codebook has an optimizer of its own, which steps inside the forward pass."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class LearnedCodebook(nn.Module):
    def __init__(self, size, width):
        super().__init__()
        self.codes = nn.Parameter(torch.randn(size, width))
        self.optimizer = torch.optim.SGD([self.codes], lr=0.5)

    def forward(self, x):
        chosen = torch.cdist(x, self.codes).argmin(1)
        if self.training:
            loss = nn.functional.mse_loss(self.codes[chosen], x.detach())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        quantised = self.codes[chosen].detach()
        return x + (quantised - x).detach(), nn.functional.mse_loss(x, quantised)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(12, 6)
        self.codebook = LearnedCodebook(24, 6)
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
    model = DDP(Autoencoder(), find_unused_parameters=True)
    optimizer = torch.optim.Adam([p for name, p in model.named_parameters() if "codebook" not in name], lr=1e-3)
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
