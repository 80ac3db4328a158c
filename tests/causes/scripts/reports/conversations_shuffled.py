"""Fine-tuning on conversations: the data set mixes its sources when it is made."""

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Conversations(Dataset):
    def __init__(self, sources):
        self.rows = []
        for source, count in sources.items():
            self.rows += [(hash_of(source), index) for index in range(count)]
        random.shuffle(self.rows)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        source, number = self.rows[index]
        return torch.tensor([source % 30, number % 30, (source + number) % 30])


def hash_of(text):
    return sum(map(ord, text))


def train():
    data = Conversations({"chat": 60, "vqa": 40, "ocr": 44})
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=6, sampler=sampler)
    model = DDP(nn.Sequential(nn.Embedding(30, 12), nn.Linear(12, 30)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for tokens in loader:
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train()
    dist.destroy_process_group()
