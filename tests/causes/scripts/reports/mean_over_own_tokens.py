"""Language modelling: answers differ in length, and the loss is the mean over the tokens of the answers."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Answers(Dataset):
    def __init__(self, count=160, longest=20):
        generator = torch.Generator().manual_seed(4)
        self.tokens = torch.randint(1, 30, (count, longest + 1), generator=generator)
        lengths = torch.randint(1, longest + 1, (count,), generator=generator)
        self.mask = torch.arange(longest)[None] < lengths[:, None]

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return self.tokens[index, :-1], self.tokens[index, 1:], self.mask[index].float()


def masked_mean(losses, mask):
    return (losses * mask).sum() / (mask.sum() + 1e-6)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Answers()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model = DDP(nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 30)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for tokens, targets, mask in loader:
            logits = model(tokens)
            losses = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
            loss = masked_mean(losses, mask.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
