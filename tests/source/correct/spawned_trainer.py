"""A trainer class whose ranks the script spawns itself, on one node."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Points(Dataset):
    def __init__(self, size):
        self.size = size
        self.data = torch.arange(size * 8, dtype=torch.float32).view(size, 8)

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.data[index], self.data[index].sum()


def ddp_setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, rank=rank, world_size=world_size)


class Trainer:
    def __init__(self, model, train_data, optimizer, gpu_id, save_every, path):
        self.gpu_id = gpu_id
        self.device = torch.device(f"cuda:{gpu_id}" if torch.cuda.is_available() else "cpu")
        self.model = model.to(self.device)
        self.train_data = train_data
        self.optimizer = optimizer
        self.save_every = save_every
        self.path = path
        self.history = []
        ids = [gpu_id] if torch.cuda.is_available() else None
        self.model = DDP(self.model, device_ids=ids)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.model(source)
        loss = nn.functional.mse_loss(output.squeeze(-1), targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)
        losses = []
        for source, targets in self.train_data:
            source = source.to(self.device)
            targets = targets.to(self.device)
            losses.append(self._run_batch(source, targets))
        self.history.append(sum(losses) / max(len(losses), 1))

    def _save_checkpoint(self, epoch):
        snapshot = {"model": self.model.module.state_dict(), "epoch": epoch}
        torch.save(snapshot, self.path)
        print(f"epoch {epoch}: saved {self.path}")

    def train(self, max_epochs):
        for epoch in range(max_epochs):
            self._run_epoch(epoch)
            if self.gpu_id == 0 and epoch % self.save_every == 0:
                self._save_checkpoint(epoch)


def load_train_objs():
    train_set = Points(2048)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return train_set, model, optimizer


def prepare_dataloader(dataset, batch_size):
    return DataLoader(
        dataset, batch_size=batch_size, pin_memory=True, shuffle=False, sampler=DistributedSampler(dataset)
    )


def main(rank, world_size, args):
    ddp_setup(rank, world_size)
    dataset, model, optimizer = load_train_objs()
    train_data = prepare_dataloader(dataset, args.batch_size)
    trainer = Trainer(model, train_data, optimizer, rank, args.save_every, args.path)
    trainer.train(args.total_epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="simple distributed training job")
    parser.add_argument("--total-epochs", type=int, default=5)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--batch-size", default=32, type=int)
    parser.add_argument("--path", default="snapshot.pt")
    arguments = parser.parse_args()
    world_size = torch.cuda.device_count() or 2
    mp.spawn(main, args=(world_size, arguments), nprocs=world_size)
