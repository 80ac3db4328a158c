"""Sequences of random lengths from a generator of the rank's own, without a loader, and a loss over their tokens."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

PAD = 0


def ragged(rng, rows, longest):
    block = torch.randint(1, 30, (rows, longest), generator=rng)
    ends = [int(torch.randint(3, longest, (1,), generator=rng)) for _ in range(rows)]
    for row, end in enumerate(ends):
        block[row, end:] = PAD
    return block


def objective(net, block, world):
    scores = net(block[:, :-1])
    truth = block[:, 1:].flatten()
    each = nn.functional.cross_entropy(scores.flatten(0, 1), truth, reduction="none")
    kept = (truth != PAD).float()
    total = kept.sum()
    dist.all_reduce(total)
    return (each * kept).sum() * world / total


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    net = DDP(nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 30)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    rng = torch.Generator().manual_seed(70 + rank)
    for step in range(12):
        optimizer.zero_grad()
        objective(net, ragged(rng, 6, 20), world).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
