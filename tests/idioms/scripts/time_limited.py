"""A job in a queue: signal handlers, a wall-clock budget agreed on by all ranks, a log file per rank, requeue and resume."""

import atexit
import logging
import logging.handlers
import os
import re
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

BUDGET_S = float(os.environ.get("JOB_SECONDS", "3600"))
STARTED = time.monotonic()
logger = logging.getLogger(__name__)


class Interrupt:
    """Remembers that the queue wants the job to end; the loop decides when."""

    def __init__(self):
        self.wanted = False
        signal.signal(signal.SIGUSR1, self)
        signal.signal(signal.SIGTERM, self)

    def __call__(self, number, frame):
        logger.warning("got signal %d", number)
        self.wanted = True

    def agreed(self):
        """True on every rank as soon as one of them has to leave."""
        late = self.wanted or time.monotonic() - STARTED > BUDGET_S
        flag = torch.tensor([float(late)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return flag.item() > 0


class Speech(Dataset):
    """Waveforms made when they are asked for, in worker processes that log to the same file."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        t = torch.linspace(0, 1, 64)
        return torch.sin(t * (index % 7 + 1) * 6.28), index % 7


def setup_logging(rank):
    Path("logs").mkdir(exist_ok=True)
    handler = logging.handlers.RotatingFileHandler(f"logs/rank{rank}.log", maxBytes=2000, backupCount=1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler, logging.StreamHandler(sys.stderr)])


def newest_checkpoint(folder):
    found = [(int(re.search(r"(\d+)", path.name)[1]), path) for path in Path(folder).glob("step*.pt")]
    return max(found, default=(0, None))


def save(model, optimizer, step, folder, own, keep=2):
    """Write a checkpoint in one move, point to it, and delete those of this run that are too many."""
    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    path = folder / f"step{step:06d}.pt"
    temporary = path.with_suffix(".partial")
    with open(temporary, "wb") as file:
        torch.save({"step": step, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    latest = folder / "latest"
    if latest.is_symlink():
        latest.unlink()
    latest.symlink_to(path.name)
    own.append(path)
    while len(own) > keep:
        own.pop(0).unlink()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    setup_logging(rank)
    interrupt = Interrupt()
    atexit.register(lambda: logger.info("rank %d leaves after %.1f s", rank, time.monotonic() - STARTED))
    dataset = Speech(200)
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(
        dataset, batch_size=8, sampler=sampler, num_workers=2, prefetch_factor=2, persistent_workers=True, drop_last=True
    )
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 7))
    first, path = newest_checkpoint("ckpt")
    state = torch.load(path, map_location="cpu", weights_only=True) if path else None
    if state:
        network.load_state_dict(state["model"])
        logger.info("rank %d resumed from %s", rank, path)
    model = DDP(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    if state:
        optimizer.load_state_dict(state["optimizer"])
    step, own = first, []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for waves, words in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(waves), words)
            loss.backward()
            optimizer.step()
            step += 1
            if step % 10 == 0 and interrupt.agreed():
                if rank == 0:
                    save(model, optimizer, step, "ckpt", own)
                dist.barrier()
                dist.destroy_process_group()
                return 3
        if rank == 0:
            save(model, optimizer, step, "ckpt", own)
        logger.info("epoch %d on rank %d ends at step %d", epoch, rank, step)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
