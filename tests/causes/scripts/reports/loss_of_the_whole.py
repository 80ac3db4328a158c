"""Graph regression: the mean error of an epoch, which chooses the best model, is the sum over the samples."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def run_epoch(model, loader, optimizer=None):
    total = 0.0
    for x, y in loader:
        with torch.set_grad_enabled(optimizer is not None):
            loss = nn.functional.l1_loss(model(x), y)
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        total += loss.item() * len(x)
    return total / len(loader.dataset)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    graphs = TensorDataset(torch.randn(200, 12), torch.randn(200, 1))
    held = TensorDataset(torch.randn(60, 12), torch.randn(60, 1))
    sampler = DistributedSampler(graphs)
    train = DataLoader(graphs, batch_size=10, sampler=sampler)
    validation = DataLoader(held, batch_size=10, sampler=DistributedSampler(held, shuffle=False))
    model = DDP(nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    best = float("inf")
    for epoch in range(3):
        sampler.set_epoch(epoch)
        error = run_epoch(model, train, optimizer)
        model.eval()
        held_error = run_epoch(model, validation)
        model.train()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: training error {error:.4f}, validation error {held_error:.4f}")
            if held_error < best:
                best = held_error
                torch.save(model.module.state_dict(), "best.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
