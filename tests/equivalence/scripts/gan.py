"""A generator and a discriminator in turn."""
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
    torch.manual_seed(5)
    data = TensorDataset(torch.randn(64, 6))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data), drop_last=True)
    generator = DDP(nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 6)))
    critic = DDP(nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)))
    of_critic = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
    of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    for (real,) in loader:
        noise = torch.randn(real.size(0), 3)
        fake = generator(noise)
        judged = critic(torch.cat([real, fake.detach()]))
        truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(fake), 1)])
        loss = F.binary_cross_entropy_with_logits(judged, truth)
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()

        for parameter in critic.parameters():
            parameter.requires_grad_(False)
        judged = critic.module(fake)
        loss = F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged))
        of_generator.zero_grad()
        loss.backward()
        of_generator.step()
        for parameter in critic.parameters():
            parameter.requires_grad_(True)
    dist.destroy_process_group()


main()
