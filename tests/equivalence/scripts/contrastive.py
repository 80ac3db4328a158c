"""Two towers and a contrastive loss over the samples of all ranks."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return tuple(parts)

    @staticmethod
    def backward(ctx, *grads):
        whole = torch.stack(grads)
        dist.all_reduce(whole)
        return whole[dist.get_rank()]


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8))
        self.text = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 8))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, a, b):
        return F.normalize(self.image(a), dim=-1), F.normalize(self.text(b), dim=-1), self.scale.exp()


def gathered(x):
    return torch.cat(Gather.apply(x))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    data = TensorDataset(torch.randn(64, 12), torch.randn(64, 10))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    model = DDP(Towers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for a, b in loader:
        image, text, scale = model(a, b)
        images, texts = gathered(image), gathered(text)
        logits = scale * images @ texts.T
        target = torch.arange(len(logits))
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


main()
