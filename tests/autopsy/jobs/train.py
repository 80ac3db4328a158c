"""A small job that fails in the way its first argument says; run by the recorder of logs on real ranks."""

from __future__ import annotations

import argparse
import ctypes
import datetime
import faulthandler
import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

RANK = int(os.environ.get("RANK", "0"))
TIMEOUT = datetime.timedelta(seconds=6)


class Samples(Dataset):  # type: ignore[misc]
    """Numbers, of which one may be missing, or may kill who loads it."""

    def __init__(self, broken: int = -1, deadly: int = -1, length: int = 16) -> None:
        self.broken, self.deadly, self.length = broken, deadly, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.broken:
            raise KeyError(f"no label for sample {index}")
        if index == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((8,), float(index))


class Net(nn.Module):  # type: ignore[misc]
    """Two layers and a head that forward may leave out."""

    def __init__(self, hidden: int = 16, head: bool = False, depth: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, hidden), *(nn.Linear(hidden, hidden) for _ in range(depth)))
        self.head = nn.Linear(hidden, 1)
        self.spare = nn.Linear(hidden, 1) if head else None
        self.reentrant = False
        self.uses_spare = False

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if self.reentrant:
            batch = checkpoint(self.body[0], batch.requires_grad_(), use_reentrant=True)
            batch = checkpoint(self.body[1], batch, use_reentrant=True)
            return self.head(checkpoint(self.body[1], batch, use_reentrant=True))
        features = self.body(batch)
        return self.spare(features) if self.uses_spare and self.spare is not None else self.head(features)


def join() -> None:
    dist.init_process_group("gloo", timeout=TIMEOUT)


def train(model: nn.Module, loader: DataLoader, steps: int = 1_000) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step, batch in enumerate(loader):
        if step == steps:
            return
        optimizer.zero_grad()
        loss = model(batch).mean()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}", flush=True)


def wrapped(**options: object) -> DistributedDataParallel:
    join()
    return DistributedDataParallel(Net(), **options)


def bad_sample() -> None:
    train(wrapped(), DataLoader(Samples(broken=9 if RANK == 1 else -1), batch_size=2))


def bad_sample_in_worker() -> None:
    train(wrapped(), DataLoader(Samples(broken=5 if RANK == 1 else -1), batch_size=2, num_workers=1))


def killed_worker() -> None:
    train(wrapped(), DataLoader(Samples(deadly=7 if RANK == 0 else -1), batch_size=2, num_workers=1))


def assertion() -> None:
    model = wrapped()
    train(model, DataLoader(Samples(), batch_size=2), steps=2)
    assert RANK != 2, "loss diverged"
    dist.barrier()


def exit_code() -> None:
    train(wrapped(), DataLoader(Samples(), batch_size=2), steps=2)
    if RANK == 0:
        sys.exit(7)
    time.sleep(60)


def leaves_silently() -> None:
    train(wrapped(), DataLoader(Samples(), batch_size=2), steps=2)
    if RANK == 1:
        os._exit(0)
    dist.barrier()


def fewer_batches() -> None:
    train(wrapped(), DataLoader(Samples(length=12 if RANK == 1 else 16), batch_size=2))


def _end_by(number: int) -> None:
    train(wrapped(), DataLoader(Samples(), batch_size=2), steps=2)
    if RANK == 1:
        os.kill(os.getpid(), number)
        time.sleep(60)
    dist.barrier()


def sigkill() -> None:
    _end_by(signal.SIGKILL)


def sigfpe() -> None:
    _end_by(signal.SIGFPE)


def sigterm_to_one() -> None:
    _end_by(signal.SIGTERM)


def segfault() -> None:
    faulthandler.enable()
    train(wrapped(), DataLoader(Samples(), batch_size=2), steps=2)
    if RANK == 1:
        ctypes.string_at(0)
    dist.barrier()


def abort() -> None:
    train(wrapped(), DataLoader(Samples(), batch_size=2), steps=2)
    if RANK == 1:
        os.abort()
    dist.barrier()


def lone_barrier() -> None:
    train(wrapped(), DataLoader(Samples(), batch_size=2), steps=2)
    if RANK == 0:
        dist.barrier()
    time.sleep(60)


def sleeper() -> None:
    model = wrapped()
    train(model, DataLoader(Samples(), batch_size=2), steps=2)
    if RANK == 1:
        time.sleep(60)
    train(model, DataLoader(Samples(), batch_size=2), steps=2)


def other_collective() -> None:
    join()
    loss = torch.ones(4)
    if RANK == 0:
        dist.broadcast(loss, 1)
    else:
        dist.all_reduce(loss)


def other_shape() -> None:
    join()
    dist.all_reduce(torch.ones(1_000 if RANK == 0 else 500))


def other_dtype() -> None:
    join()
    dist.all_reduce(torch.ones(64, dtype=torch.float64 if RANK == 1 else torch.float32))


def unused() -> None:
    join()
    train(DistributedDataParallel(Net(head=True)), DataLoader(Samples(), batch_size=2))


def unused_on_one_rank() -> None:
    join()
    net = Net(head=True)
    net.uses_spare = RANK == 1
    train(DistributedDataParallel(net), DataLoader(Samples(), batch_size=2))


def other_depth() -> None:
    join()
    DistributedDataParallel(Net(depth=1 + (RANK == 0)))


def other_width() -> None:
    join()
    DistributedDataParallel(Net(hidden=16 + 4 * RANK))


def ready_twice() -> None:
    join()
    net = Net()
    net.reentrant = True
    train(DistributedDataParallel(net), DataLoader(Samples(), batch_size=2))


def out_of_memory() -> None:
    model = wrapped()
    train(model, DataLoader(Samples(), batch_size=2), steps=2)
    if RANK == 1:
        torch.ones(1 << 46)
    dist.barrier()


def memory_limit() -> None:
    join()
    if RANK == 0:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 28), -1))
        _ = [bytearray(1 << 24) for _ in range(64)]
    dist.barrier()


def port_in_use() -> None:
    join()


def unreachable() -> None:
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:9", rank=1, world_size=2, timeout=TIMEOUT)


def missing_rank() -> None:
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29873", rank=0, world_size=3, timeout=TIMEOUT)


def missing_module() -> None:
    __import__("a_package_that_nobody_has")


def missing_file() -> None:
    join()
    dist.barrier()
    if RANK == 1:
        torch.load("checkpoint_of_rank_1.pt")
    dist.barrier()


def unknown_option() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    parser.parse_args(sys.argv[2:])
    join()


def monitored_barrier() -> None:
    join()
    if RANK == 2:
        time.sleep(30)
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=4))


def endless_recursion() -> None:
    join()

    def deeper(depth: int) -> int:
        return deeper(depth + 1)

    if RANK == 1:
        deeper(0)
    dist.barrier()


def backward_twice() -> None:
    loss = wrapped()(torch.ones(2, 8)).mean()
    loss.backward()
    loss.backward()


def rethrown_loss_of_peer() -> None:
    model = wrapped()
    try:
        if RANK == 1:
            raise FloatingPointError("loss is nan in step 3")
        train(model, DataLoader(Samples(), batch_size=2))
        dist.barrier()
    except RuntimeError as error:
        raise RuntimeError("training failed") from error


def store_key() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, True, datetime.timedelta(seconds=3))
    store.get("ready")


def group_of_some() -> None:
    join()
    if RANK == 0:
        dist.new_group([0, 1], timeout=TIMEOUT)
    time.sleep(30)


def nccl_without_gpu() -> None:
    dist.init_process_group("nccl", timeout=TIMEOUT)


def no_driver() -> None:
    torch.cuda.set_device(RANK)


def no_group() -> None:
    dist.all_reduce(torch.ones(1))


def frozen() -> None:
    join()
    DistributedDataParallel(Net().requires_grad_(False))


def healthy() -> None:
    train(wrapped(), DataLoader(Samples(), batch_size=2), steps=3)
    dist.barrier()
    os._exit(0)


def needless_flag() -> None:
    train(wrapped(find_unused_parameters=True), DataLoader(Samples(), batch_size=2), steps=3)
    dist.barrier()
    os._exit(0)


def sleeps() -> None:
    join()
    print("joined", flush=True)
    time.sleep(60)


def _spawned(rank: int, number: int) -> None:
    time.sleep(1)
    if rank == 1 and number:
        os.kill(os.getpid(), number)
    if rank == 1:
        raise ZeroDivisionError("no samples in this shard")
    time.sleep(30)


def spawned_exception() -> None:
    mp.spawn(_spawned, (0,), nprocs=2)


def spawned_kill() -> None:
    mp.spawn(_spawned, (int(signal.SIGKILL),), nprocs=2)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
