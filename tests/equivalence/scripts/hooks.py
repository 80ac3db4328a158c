"""A communication hook of the script's own."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def averaged(state, bucket):
    gradient = bucket.buffer().div_(dist.get_world_size())
    future = dist.all_reduce(gradient, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    data = TensorDataset(torch.randn(96, 9), torch.randn(96, 1))
    loader = DataLoader(data, batch_size=3, sampler=DistributedSampler(data))
    model = DDP(nn.Sequential(nn.Linear(9, 24), nn.SiLU(), nn.Linear(24, 1)))
    model.register_comm_hook(None, averaged)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in loader:
        loss = F.smooth_l1_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


main()
