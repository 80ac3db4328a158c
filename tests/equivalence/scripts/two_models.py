"""An encoder and a decoder, each wrapped, under one optimizer, with a random code between them."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    data = TensorDataset(torch.rand(80, 14))
    loader = DataLoader(data, batch_size=5, sampler=DistributedSampler(data))
    encoder = DDP(nn.Sequential(nn.Linear(14, 16), nn.ReLU(), nn.Linear(16, 8)))
    decoder = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 14)))
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)
    for (x,) in loader:
        mean, spread = encoder(x).chunk(2, dim=1)
        code = mean + torch.randn_like(spread) * (0.5 * spread).exp()
        told = decoder(code)
        loss = F.mse_loss(told, x)
        loss = loss - 0.05 * (1 + spread - mean.pow(2) - spread.exp()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


main()
