"""Classes of different frequency, weighted in the loss."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(13)
    labels = torch.cat([torch.zeros(40), torch.ones(16), torch.full((8,), 2)]).long()
    data = TensorDataset(torch.randn(64, 6), labels)
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = labels
    weight = len(mine) / (3 * mine.bincount(minlength=3).clamp(min=1))
    criterion = nn.CrossEntropyLoss(weight=weight, reduction="none")
    for x, y in loader:
        loss = criterion(model(x), y).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


main()
