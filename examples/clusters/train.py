"""A small training for any launcher: torchrun, srun and mpirun tell a rank who it is by different variables.

SLOW=1 in the environment makes rank 1 sleep 40 ms in every step; HANG=1 has rank 0 wait where nobody comes.
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LAUNCHERS = (
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)


def main():
    for rank, size, local_rank in LAUNCHERS:
        if "RANK" not in os.environ and rank in os.environ:
            told = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank}
            os.environ.update({name: os.environ[variable] for name, variable in told.items()})
    dist.init_process_group("gloo")
    rank, slow = dist.get_rank(), int(os.environ.get("SLOW", "-1"))
    data = TensorDataset(torch.randn(4096, 64))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    layers = (nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    model = DistributedDataParallel(nn.Sequential(*layers), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (inputs,) in loader:
            optimizer.zero_grad()
            time.sleep(0.03 + 0.04 * (rank == slow))
            model(inputs).pow(2).mean().backward()
            optimizer.step()
        if "HANG" in os.environ and rank == 0:
            dist.barrier()
    if rank == 0:
        print("trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
