"""A small language model trained by a Trainer with a config, a snapshot to resume from, and an own data source."""

import os
from dataclasses import asdict, dataclass
from typing import Any, Optional

import torch
import torch.nn as nn
from torch.distributed import barrier, destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, random_split
from torch.utils.data.distributed import DistributedSampler


@dataclass
class TrainerConfig:
    max_epochs: int = 3
    batch_size: int = 16
    workers: int = 1
    grad_norm_clip: float = 1.0
    snapshot_path: Optional[str] = "snapshot.pt"
    save_every: int = 1
    use_amp: bool = True


@dataclass
class Snapshot:
    model_state: Any
    optimizer_state: Any
    finished_epoch: int


class Characters(Dataset):
    def __init__(self, block_size=16):
        text = "".join(chr(97 + (i * i) % 17) for i in range(600))
        self.stoi = {c: i for i, c in enumerate(sorted(set(text)))}
        self.data, self.block_size = [self.stoi[c] for c in text], block_size

    def __len__(self):
        return len(self.data) - self.block_size

    def __getitem__(self, index):
        chunk = torch.tensor(self.data[index : index + self.block_size + 1])
        return chunk[:-1], chunk[1:]


class Model(nn.Module):
    def __init__(self, vocabulary, dim=24):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocabulary)

    @property
    def device(self):
        return next(self.parameters()).device

    def forward(self, idx, targets=None):
        logits = self.head(self.rnn(self.embed(idx))[0])
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


class Trainer:
    def __init__(self, config, model, optimizer, train_dataset, test_dataset=None):
        self.config = config
        self.local_rank, self.global_rank = int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"])
        self.train_dataset = train_dataset
        self.train_loader = self._prepare_dataloader(train_dataset)
        self.test_loader = self._prepare_dataloader(test_dataset) if test_dataset else None
        self.epochs_run = 0
        self.model, self.optimizer = model.to(self.local_rank), optimizer
        if self.config.use_amp:
            self.scaler = torch.amp.GradScaler("cuda")
        self._load_snapshot()
        self.model = DDP(self.model, device_ids=[self.local_rank], gradient_as_bucket_view=True)

    def _prepare_dataloader(self, dataset):
        return DataLoader(dataset, batch_size=self.config.batch_size, pin_memory=True, shuffle=False,
                          num_workers=self.config.workers, sampler=DistributedSampler(dataset))

    def _load_snapshot(self):
        try:
            snapshot_data = torch.load(self.config.snapshot_path, map_location=f"cuda:{self.local_rank}")
        except FileNotFoundError:
            print("Snapshot not found. Training model from scratch") if self.global_rank == 0 else None
            return
        snapshot = Snapshot(**snapshot_data)
        self.model.load_state_dict(snapshot.model_state)
        self.optimizer.load_state_dict(snapshot.optimizer_state)
        self.epochs_run = snapshot.finished_epoch

    def _run_batch(self, source, targets, train=True):
        with torch.set_grad_enabled(train), torch.amp.autocast("cuda", dtype=torch.float16, enabled=self.config.use_amp):
            _, loss = self.model(source, targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            if self.config.use_amp:
                self.scaler.scale(loss).backward()
                self.scaler.unscale_(self.optimizer)
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
                self.optimizer.step()
        return loss

    def _run_epoch(self, epoch, loader, train=True):
        loader.sampler.set_epoch(epoch)
        for i, (source, targets) in enumerate(loader):
            source, targets = source.to(self.local_rank), targets.to(self.local_rank)
            loss = self._run_batch(source, targets, train)
            if i % 100 == 0 and self.global_rank == 0:
                print(f"[GPU{self.global_rank}] Epoch {epoch} | Iter {i} | {'Train' if train else 'Eval'} {loss:.5f}")

    def _save_snapshot(self, epoch):
        raw_model = self.model.module if hasattr(self.model, "module") else self.model
        snapshot = Snapshot(raw_model.state_dict(), self.optimizer.state_dict(), epoch)
        torch.save(asdict(snapshot), self.config.snapshot_path)
        print(f"Snapshot saved at epoch {epoch}")

    def train(self):
        for epoch in range(self.epochs_run, self.config.max_epochs):
            self._run_epoch(epoch + 1, self.train_loader, train=True)
            if self.local_rank == 0 and epoch % self.config.save_every == 0 and self.global_rank == 0:
                self._save_snapshot(epoch + 1)
            if self.test_loader:
                self.model.eval()
                self._run_epoch(epoch + 1, self.test_loader, train=False)
                self.model.train()


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    init_process_group(backend="nccl")
    torch.manual_seed(0)
    data = Characters()
    train_set, test_set = random_split(data, [len(data) - 96, 96], generator=torch.Generator().manual_seed(1))
    model = Model(len(data.stoi))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    Trainer(TrainerConfig(), model, optimizer, train_set, test_set).train()
    barrier()
    destroy_process_group()


if __name__ == "__main__":
    main()
