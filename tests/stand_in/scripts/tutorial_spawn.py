"""The basic example: a toy model on each GPU, a checkpoint that rank 0 writes and all load, a model of two parts."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "28355"
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.second = nn.Linear(10, 5)

    def forward(self, x):
        return self.second(self.relu(self.first(x)))


class ToyTwoParts(nn.Module):
    """Moves what flows between its parts, which may stand on different GPUs."""

    def __init__(self, dev0, dev1):
        super().__init__()
        self.dev0, self.dev1 = dev0, dev1
        self.net1 = nn.Linear(10, 10).to(dev0)
        self.net2 = nn.Linear(10, 5).to(dev1)

    def forward(self, x):
        x = torch.relu(self.net1(x.to(self.dev0)))
        return self.net2(x.to(self.dev1))


def samples(rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(20, 10, generator=generator)
    return x, x[:, :5] * 2


def demo_basic(rank, world_size):
    print(f"basic DDP on rank {rank}.", file=sys.stderr)
    setup(rank, world_size)
    model = ToyModel().to(rank)
    ddp_model = DDP(model, device_ids=[rank], gradient_as_bucket_view=True)
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.001)
    for step in range(3):
        optimizer.zero_grad()
        x, labels = samples(rank, step)
        outputs = ddp_model(x.to(rank))
        loss_fn(outputs, labels.to(rank)).backward()
        optimizer.step()
    cleanup()


def demo_checkpoint(rank, world_size):
    setup(rank, world_size)
    ddp_model = DDP(ToyModel().to(rank), device_ids=[rank], gradient_as_bucket_view=True)
    path = os.path.join(tempfile.gettempdir(), f"toy-{os.getppid()}.checkpoint")
    if rank == 0:
        torch.save(ddp_model.state_dict(), path)
    dist.barrier()
    map_location = {"cuda:%d" % 0: "cuda:%d" % rank}
    ddp_model.load_state_dict(torch.load(path, map_location=map_location, weights_only=True))
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.001)
    optimizer.zero_grad()
    x, labels = samples(rank, 0)
    loss_fn(ddp_model(x.to(rank)), labels.to(rank)).backward()
    optimizer.step()
    dist.barrier()
    if rank == 0:
        os.remove(path)
    cleanup()


def demo_two_parts(rank, world_size):
    setup(rank, world_size)
    mp_model = ToyTwoParts(torch.device("cuda", rank), torch.device("cuda", rank))
    ddp_mp_model = DDP(mp_model, gradient_as_bucket_view=True)
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_mp_model.parameters(), lr=0.001)
    for step in range(2):
        optimizer.zero_grad()
        x, labels = samples(rank, step)
        outputs = ddp_mp_model(x)
        loss_fn(outputs, labels.to(outputs.device)).backward()
        optimizer.step()
    cleanup()


def run_demo(demo_fn, world_size):
    mp.spawn(demo_fn, args=(world_size,), nprocs=world_size, join=True)


if __name__ == "__main__":
    n_gpus = torch.cuda.device_count()
    assert n_gpus >= 2, f"Requires at least 2 GPUs to run, but got {n_gpus}"
    torch.set_float32_matmul_precision("high")
    run_demo(demo_basic, n_gpus)
    run_demo(demo_checkpoint, n_gpus)
    run_demo(demo_two_parts, n_gpus)
