"""Validation on all ranks, the decision to stop made by rank 0 and broadcast, best weights restored at the end."""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler

EPOCHS = int(os.environ.get("EPOCHS", "30"))
PATIENCE = 2


class EarlyStopping:
    def __init__(self, patience, min_delta=0.0):
        self.patience, self.min_delta = patience, min_delta
        self.counter, self.best = 0, float("inf")

    def step(self, value):
        if value < self.best - self.min_delta:
            self.best, self.counter = value, 0
            return True
        self.counter += 1
        return False

    @property
    def should_stop(self):
        return self.counter >= self.patience


def loaders(batch_size=16):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(320, 8, generator=generator)
    data = TensorDataset(x, (x[:, :1] - x[:, 1:2]).tanh())
    train, val = random_split(data, [256, 64], generator=torch.Generator().manual_seed(42))
    sampler = DistributedSampler(train, shuffle=True, seed=42)
    train_loader = DataLoader(train, batch_size=batch_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val, batch_size=batch_size, sampler=DistributedSampler(val, shuffle=False))
    return train_loader, val_loader, sampler


def validate(model, loader):
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for x, y in loader:
            totals += torch.tensor([nn.functional.mse_loss(model(x), y, reduction="sum").item(), len(x)])
    dist.all_reduce(totals, op=dist.ReduceOp.SUM)
    model.train()
    return (totals[0] / totals[1]).item()


def run():
    rank = dist.get_rank()
    train_loader, val_loader, sampler = loaders()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    stopper = EarlyStopping(PATIENCE)
    best_weights = copy.deepcopy(model.module.state_dict())
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            optimizer.zero_grad(set_to_none=True)
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        value = validate(model, val_loader)
        plateau.step(value)
        stop = torch.zeros(1)
        if rank == 0:
            if stopper.step(value):
                best_weights = copy.deepcopy(model.module.state_dict())
            if stopper.should_stop:
                print(f"no improvement for {PATIENCE} epochs, stopping after epoch {epoch}")
                stop += 1
        dist.broadcast(stop, src=0)
        if stop.item() == 1:
            break
    dist.barrier()
    if rank == 0:
        model.module.load_state_dict(best_weights)
        torch.save(model.module.state_dict(), "best.pt")
        print(f"best validation loss {stopper.best:.4f}")


def main():
    dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")
    try:
        run()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
