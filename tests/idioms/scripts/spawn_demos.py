"""Three demonstrations in a row, each with its own spawned ranks, as the DDP tutorial does."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def demo_basic(rank, world_size):
    print(f"basic DDP on rank {rank}")
    setup(rank, world_size)
    ddp_model = DDP(ToyModel())
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.001)

    optimizer.zero_grad()
    outputs = ddp_model(torch.randn(20, 10))
    labels = torch.randn(20, 5)
    loss_fn(outputs, labels).backward()
    optimizer.step()
    cleanup()
    print(f"rank {rank} is done")


def demo_checkpoint(rank, world_size):
    print(f"checkpoint on rank {rank}")
    setup(rank, world_size)
    ddp_model = DDP(ToyModel())
    path = os.path.join(tempfile.gettempdir(), f"spawn_demo_{os.getppid()}.checkpoint")
    if rank == 0:
        torch.save(ddp_model.state_dict(), path)
    # Nobody reads before rank 0 has written.
    dist.barrier()
    ddp_model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))

    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.001)
    for _ in range(2):
        optimizer.zero_grad()
        loss_fn(ddp_model(torch.randn(20, 10)), torch.randn(20, 5)).backward()
        optimizer.step()

    # Nobody reads any more when rank 0 deletes.
    dist.barrier()
    if rank == 0:
        os.remove(path)
    cleanup()


def demo_two_stages(rank, world_size):
    print(f"two stages on rank {rank}")
    setup(rank, world_size)
    stages = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))
    ddp_model = DDP(stages)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.001)
    optimizer.zero_grad()
    nn.functional.mse_loss(ddp_model(torch.randn(20, 10)), torch.randn(20, 5)).backward()
    optimizer.step()
    cleanup()


def run_demo(demo, world_size):
    mp.spawn(demo, args=(world_size,), nprocs=world_size, join=True)


if __name__ == "__main__":
    n_ranks = torch.cuda.device_count() if torch.cuda.is_available() else 2
    if n_ranks < 2:
        sys.exit(f"needs at least 2 ranks, got {n_ranks}")
    run_demo(demo_basic, n_ranks)
    run_demo(demo_checkpoint, n_ranks)
    run_demo(demo_two_stages, n_ranks)
