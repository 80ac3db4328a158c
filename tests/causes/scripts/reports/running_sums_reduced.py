"""Forces of molecules: the errors are summed over the batches of the validation set."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Evaluator:
    def eval(self, predicted, target, metrics):
        error = (predicted - target).abs()
        for name, value in (("mae", error.sum()), ("mse", error.pow(2).sum())):
            entry = metrics.setdefault(name, {"total": 0.0, "numel": 0.0})
            entry["total"] += float(value)
            entry["numel"] += error.numel()
        return metrics


def reduce_metrics(metrics):
    for entry in metrics.values():
        both = torch.tensor([entry["total"], entry["numel"]])
        dist.all_reduce(both)
        entry["total"], entry["numel"] = both.tolist()
    return metrics


def validate(model, loader, evaluator):
    model.eval()
    metrics = {}
    for x, y in loader:
        with torch.no_grad():
            predicted = model.module(x)
        metrics = evaluator.eval(predicted, y, metrics)
        metrics = reduce_metrics(metrics)
    model.train()
    return {name: entry["total"] / entry["numel"] for name, entry in metrics.items()}


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 9), torch.randn(256, 3))
    held = TensorDataset(torch.randn(640, 9), torch.randn(640, 3))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    valid = DataLoader(held, batch_size=8, sampler=DistributedSampler(held, shuffle=False))
    model = DDP(nn.Sequential(nn.Linear(9, 32), nn.SiLU(), nn.Linear(32, 3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    evaluator = Evaluator()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.l1_loss(model(x), y).backward()
            optimizer.step()
        results = validate(model, valid, evaluator)
        if dist.get_rank() == 0:
            print(epoch, results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
