"""Each process is shown one GPU, which is then the first; paths, devices and evaluation that fit."""

import os

import torch
import torch.distributed as dist
import torchvision
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("LOCAL_RANK", "0")


def main():
    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda:0")
    optimizer_model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(optimizer_model.parameters(), lr=0.1)
    model = DDP(optimizer_model.to(device))
    path = f"ckpt_{dist.get_rank()}.pt"
    torch.save(model.state_dict(), path)
    model.load_state_dict(torch.load(path, map_location=device))
    first = torch.load("first.pt", map_location={"cuda:0": f"cuda:{rank}"})
    model.module.load_state_dict(first)
    torch.nn.utils.clip_grad_norm_(model.module.parameters(), 1.0)
    if rank == 0:
        torchvision.datasets.CIFAR10("data", download=True)
    dist.barrier()
    data = torchvision.datasets.CIFAR10("data", download=False)
    loader = DataLoader(data, sampler=DistributedSampler(data, shuffle=False), num_workers=2, pin_memory=True)
    with torch.autocast("cuda"):
        for x, _ in loader:
            model(x).sum().backward()
    with torch.no_grad():
        if dist.get_rank() == 0:
            for x, _ in loader:
                model.module(x)
    dist.barrier()
    dist.destroy_process_group()


main()
