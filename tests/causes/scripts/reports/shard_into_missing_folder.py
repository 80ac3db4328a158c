"""Every rank keeps the shard of the optimizer that it owns; rank 0 keeps the model."""

import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def save_checkpoint(directory, step, model_data, optimizer_data, meta, rank):
    if rank == 0:
        os.makedirs(directory, exist_ok=True)
        torch.save(model_data, os.path.join(directory, f"model_{step:06d}.pt"))
        with open(os.path.join(directory, f"meta_{step:06d}.json"), "w") as file:
            json.dump(meta, file)
    torch.save(optimizer_data, os.path.join(directory, f"optim_{step:06d}_rank{rank}.pt"))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(320, 8), torch.randn(320, 1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            step += 1
    where = os.path.join(os.environ.get("BASE", "runs"), "d20")
    save_checkpoint(where, step, model.module.state_dict(), optimizer.state_dict(), {"step": step}, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
