"""Started by srun with one task a GPU: ranks from Slurm's variables, jit, func, and logs of the GPU's memory."""

import os
import socket
import subprocess

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def init_from_slurm():
    rank, local_rank, world = (int(os.environ[name]) for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"))
    if "MASTER_ADDR" not in os.environ:
        hosts = subprocess.run(["scontrol", "show", "hostnames", os.environ["SLURM_NODELIST"]], capture_output=True,
                               text=True, check=True).stdout.split()
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = hosts[0], "12910"
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(local_rank))
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    return rank, local_rank, world


def init_from_launcher():
    rank, local_rank, world = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    return rank, local_rank, world


@torch.jit.script
def robust(error: torch.Tensor, limit: float) -> torch.Tensor:
    size = error.abs()
    return torch.where(size < limit, 0.5 * size * size, limit * (size - 0.5 * limit)).mean()


class Encoder(nn.Module):
    def __init__(self, inside=12, width=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(inside, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, 2))

    def forward(self, x):
        return self.net(x).chunk(2, dim=1)


def describe(device):
    free, total = torch.cuda.mem_get_info(device)
    major, minor = torch.cuda.get_device_capability(device)
    return (f"{torch.cuda.get_device_name(device)} sm_{major}{minor} {free >> 20}/{total >> 20} MB, peak "
            f"{torch.cuda.max_memory_allocated(device) >> 20} MB, CUDA {torch.version.cuda}")


def sensitivity(model, batch):
    """Mean norm of the derivative of the output by each sample's input."""
    jacobian = torch.func.vmap(torch.func.jacrev(lambda x: model(x[None])[0].sum()))(batch)
    return jacobian.norm(dim=1).mean()


def main():
    under_slurm = "SLURM_PROCID" in os.environ and "LOCAL_RANK" not in os.environ
    rank, local_rank, world = init_from_slurm() if under_slurm else init_from_launcher()
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(400, 12, generator=generator)
    data = TensorDataset(x, x[:, :1] * 3 + 0.1 * torch.randn(400, 1, generator=generator))
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, drop_last=True)
    loader = DataLoader(data, batch_size=16, sampler=sampler, num_workers=int(os.environ.get("SLURM_CPUS_PER_TASK", 1)),
                        pin_memory=True, drop_last=True)
    encoder = Encoder().to(device)
    model = DDP(encoder, device_ids=[local_rank], gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=4 * len(loader))
    if rank == 0:
        print(f"{world} ranks, first on {socket.gethostname()}: {describe(device)}")
    for epoch in range(4):
        sampler.set_epoch(epoch)
        losses = []
        for batch, target in loader:
            batch, target = (t.to(device, non_blocking=True) for t in (batch, target))
            with torch.autocast("cuda", torch.bfloat16):
                mean, spread = model(batch)
            loss = robust((mean.float() - target) * torch.exp(-spread.float()), 1.0) + spread.float().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            losses.append(loss.detach())
        encoder.eval()
        total = torch.stack([torch.stack(losses).mean(), sensitivity(encoder, batch[:4]).detach()])
        encoder.train()
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        if rank == 0:
            print(f"epoch {epoch}: loss {total[0]:.4f}, sensitivity {total[1]:.3f}")
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.empty_cache()
    if rank == 0:
        torch.save(encoder.state_dict(), "encoder.pt")
    dist.barrier(device_ids=[local_rank])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
