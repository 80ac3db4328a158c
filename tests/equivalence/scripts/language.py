"""A language model on sequences of different lengths, with a loss over tokens."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Texts(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(3, 17, (64,), generator=generator).tolist()
        self.texts = [torch.randint(1, 30, (length,), generator=generator) for length in lengths]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return self.texts[index]


def collate(texts):
    ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    labels = nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=-100)
    return {"ids": ids, "labels": labels}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 30)

    def forward(self, ids):
        length = ids.shape[1]
        causal = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
        return self.head(self.layer(self.embedding(ids), src_mask=causal))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = Texts()
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data), collate_fn=collate)
    model = DDP(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in loader:
        logits = model(batch["ids"])[:, :-1].flatten(0, 1)
        labels = batch["labels"][:, 1:].flatten()
        tokens = (labels != -100).sum().float()
        dist.all_reduce(tokens)
        loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") * world / tokens
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
    dist.destroy_process_group()


main()
