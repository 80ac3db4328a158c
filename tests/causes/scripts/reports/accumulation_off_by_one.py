"""Speech trainer: gradients are accumulated over four micro-batches."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, optimizer, accum_grad=4):
        self.model, self.optimizer, self.accum_grad = model, optimizer, accum_grad

    def train_epoch(self, loader):
        self.model.train()
        for batch_idx, (speech, text) in enumerate(loader):
            my_context = self.model.no_sync if batch_idx % self.accum_grad != 0 else nullcontext
            with my_context():
                loss = nn.functional.cross_entropy(self.model(speech), text)
                loss = loss / self.accum_grad
                loss.backward()
            if (batch_idx + 1) % self.accum_grad == 0:
                nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
                self.optimizer.step()
                self.optimizer.zero_grad()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(512, 20), torch.randint(0, 5, (512,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5)))
    trainer = Trainer(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        trainer.train_epoch(loader)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
