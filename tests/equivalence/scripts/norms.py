"""A residual network with batch norms, as written for GPUs."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x):
        return x + torch.relu(self.norm(self.conv(x)))


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(64, 3, 8, 8), torch.randint(0, 5, (64,)))
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data), num_workers=2)
    net = nn.Sequential(nn.Conv2d(3, 6, 3), Block(), Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    model = DDP(net.cuda(), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss().cuda()
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = criterion(model(images.cuda()), labels.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


main()
