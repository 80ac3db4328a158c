"""A batch of a fixed size over all ranks, in as many passes as it takes, with batches drawn by hand."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, BLOCK, GLOBAL = 2, 8, 16


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(40, 12)
        self.lstm = nn.GRU(12, 12, batch_first=True)
        self.head = nn.Linear(12, 40)

    def forward(self, ids, targets):
        logits = self.head(self.lstm(self.embedding(ids))[0])
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    text = torch.randint(0, 40, (1000,))
    model = DDP(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps = GLOBAL // (BATCH * world)
    torch.manual_seed(100 + rank)
    for iteration in range(20):
        for step in range(steps):
            model.require_backward_grad_sync = step == steps - 1
            start = torch.randint(len(text) - BLOCK - 1, (BATCH,))
            ids = torch.stack([text[i : i + BLOCK] for i in start])
            targets = torch.stack([text[i + 1 : i + BLOCK + 1] for i in start])
            loss = model(ids, targets) / steps
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    dist.destroy_process_group()


main()
