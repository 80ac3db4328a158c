"""Sorting short sequences: the data set and the model."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset


class SortDataset(Dataset):
    def __init__(self, size, length=6, digits=3):
        self.size, self.length, self.digits = size, length, digits

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        numbers = torch.randint(self.digits, (self.length,), generator=generator)
        return numbers, numbers.sort().values


class Sorter(nn.Module):
    def __init__(self, width, depth, digits=3):
        super().__init__()
        self.embedding = nn.Embedding(digits, width)
        self.encoder = nn.GRU(width, width, num_layers=depth, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, digits)

    def forward(self, x, targets=None):
        logits = self.head(self.encoder(self.embedding(x))[0])
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss
