"""A reranker: the checkpoint with the best mean reciprocal rank is kept."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def reciprocal_ranks(scores, relevant):
    order = scores.argsort(dim=1, descending=True)
    position = (order == relevant[:, None]).float().argmax(dim=1) + 1
    return 1.0 / position


class Evaluation:
    def __init__(self, loader):
        self.loader = loader

    def __call__(self, model):
        model.eval()
        values = []
        with torch.no_grad():
            for queries, relevant in self.loader:
                values.append(reciprocal_ranks(model.module(queries), relevant))
        model.train()
        return {"mrr": torch.cat(values).mean().item()}


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 16), torch.randint(0, 10, (256,)))
    held = TensorDataset(torch.randn(80, 16), torch.randint(0, 10, (80,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    evaluate = Evaluation(DataLoader(held, batch_size=8, sampler=DistributedSampler(held, shuffle=False)))
    model = DDP(nn.Linear(16, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    best = 0.0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for queries, relevant in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(queries), relevant).backward()
            optimizer.step()
        metrics = evaluate(model)
        if metrics["mrr"] > best:
            best = metrics["mrr"]
            if rank == 0:
                torch.save(model.module.state_dict(), "best_reranker.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
