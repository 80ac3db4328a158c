"""SyncBatchNorm under the stand-in on two ranks, against BatchNorm on the whole batch in one process.

``python -m tests.stand_in.batch_norm DIRECTORY PORT`` prints the greatest differences as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpdoctor.probe.journal import Journal
from ddpdoctor.probe.stand_in.install import StandIn

STEPS = 3
SPLIT = 5
"""Samples of rank 0; rank 1 has the other three, so that counts differ."""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2)).double()


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 3, 8, 8, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def train(network: nn.Module, share: slice, scale: float) -> list[torch.Tensor]:
    """Sums of squares, so that DDP's mean over ranks is half of the whole."""
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    for batch in batches():
        optimizer.zero_grad()
        (network(batch[share].cuda()).square().sum() * scale).backward()
        optimizer.step()
    return [tensor.detach() for tensor in (*network.parameters(), *network.buffers())]


def rank_main(rank: int, directory: str, port: str) -> None:
    StandIn(Journal(directory, {}), torch, 2)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=2, device_id=torch.device("cuda", rank))
    assert dist.get_backend() == "nccl" and dist.is_nccl_available()
    assert dist.get_backend(dist.new_group([0, 1])) == "nccl"
    network = nn.SyncBatchNorm.convert_sync_batchnorm(model()).cuda()
    wrapped = DistributedDataParallel(network, device_ids=[rank], output_device=rank)
    found = train(wrapped, slice(0, SPLIT) if rank == 0 else slice(SPLIT, 8), 2.0)
    dist.barrier(device_ids=[rank])
    if rank == 0:
        expected = train(model(), slice(0, 8), 1.0)
        pairs = zip(found, expected, strict=True)
        differences = [(one.double() - other.double()).abs().max().item() for one, other in pairs]
        Path(directory, "differences.json").write_text(json.dumps(differences))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    mp.spawn(rank_main, args=tuple(sys.argv[1:3]), nprocs=2)
