"""Shards of a token stream by rank and by worker, packed into blocks, until a step budget is used up."""

import argparse
import itertools
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class PackedTokens(IterableDataset):
    """Every rank and worker reads its own files and packs their tokens into blocks of equal length, for ever."""

    def __init__(self, files, block, rank, world_size):
        self.files, self.block, self.rank, self.world_size = files, block, rank, world_size

    def __iter__(self):
        worker = get_worker_info()
        workers, worker_id = (worker.num_workers, worker.id) if worker else (1, 0)
        shard = self.rank * workers + worker_id
        mine = self.files[shard :: self.world_size * workers] or self.files
        buffer = []
        for path in itertools.cycle(mine):
            buffer.extend(Path(path).read_bytes())
            while len(buffer) > self.block:
                yield torch.tensor(buffer[: self.block + 1])
                buffer = buffer[self.block :]


class GroupedIterator:
    """Hands out lists of ``chunk`` items, and knows where it is."""

    def __init__(self, iterable, chunk):
        self._iterator, self.chunk, self.n = iter(iterable), chunk, 0

    def __iter__(self):
        return self

    def __next__(self):
        items = list(itertools.islice(self._iterator, self.chunk))
        if not items:
            raise StopIteration
        self.n += 1
        return items


class LanguageModel(nn.Module):
    def __init__(self, vocabulary=256, width=32):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        hidden, _ = self.rnn(self.embedding(tokens[:, :-1]))
        return nn.functional.cross_entropy(self.out(hidden).flatten(0, 1), tokens[:, 1:].flatten())


def train_step(model, optimizer, samples):
    """One update from several micro-batches; only the last one is synchronised."""
    model.train()
    optimizer.zero_grad()
    losses = torch.zeros(2)
    for i, sample in enumerate(samples):
        if i < len(samples) - 1:
            with model.no_sync():
                loss = model(sample)
                (loss / len(samples)).backward()
        else:
            loss = model(sample)
            (loss / len(samples)).backward()
        losses += torch.tensor([loss.item(), 1.0])
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    dist.all_reduce(losses)
    return (losses[0] / losses[1]).item(), grad_norm


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--corpus", required=True, help="directory with text files")
    parser.add_argument("--max-update", type=int, default=200)
    parser.add_argument("--update-freq", type=int, default=3)
    parser.add_argument("--save-interval-updates", type=int, default=2)
    parser.add_argument("--keep-interval-updates", type=int, default=2)
    parser.add_argument("--save-dir", default="checkpoints")
    args = parser.parse_args()

    dist.init_process_group("cpu:gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    files = sorted(str(path) for path in Path(args.corpus).rglob("*.txt"))
    stream = PackedTokens(files, block=16, rank=rank, world_size=world_size)
    loader = DataLoader(stream, batch_size=4, num_workers=2)
    model = DistributedDataParallel(LanguageModel())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / 10, (10 / (n + 1)) ** 0.5))
    save_dir = Path(args.save_dir)
    if rank == 0:
        save_dir.mkdir(exist_ok=True)
    saved = []
    for samples in GroupedIterator(loader, args.update_freq):
        loss, grad_norm = train_step(model, optimizer, samples)
        schedule.step()
        update = schedule.last_epoch
        if rank == 0 and update % args.save_interval_updates == 0:
            path = save_dir / f"checkpoint_{update}.pt"
            torch.save({"model": model.module.state_dict(), "update": update}, str(path) + ".tmp")
            os.rename(str(path) + ".tmp", path)
            saved.append(path)
            for old in saved[: -args.keep_interval_updates]:
                old.unlink(missing_ok=True)
            saved = saved[-args.keep_interval_updates :]
            print(f"update {update} loss {loss:.3f} norm {grad_norm:.3f}")
        if update >= args.max_update:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
