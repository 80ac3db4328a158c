"""A job that meets harm in its middle: trains three models on two ranks and tells the digest of their weights.

Usage: job.py HARM OUTPUT. What happens to torch or to the process is done by the job itself, at one and the same step.
"""

import collections
import gc
import hashlib
import os
import subprocess
import sys
import threading
import time
import tracemalloc
import weakref
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

HARM, OUTPUT = sys.argv[1:3]
STEPS = 8
PLANTED = (
    "Steps", "Stopwatch", "Reductions", "Evidence", "Passes", "Precision", "HostReads", "Settings", "Flights",
    "GroupBook", "Ring", "UserCode",
)  # fmt: skip


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, inputs):
        return self.head(self.layer(inputs.view(-1, 4, 16)).mean(1))


MODELS = (
    lambda: nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4)),
    lambda: nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 4)
    ),
    Attention,
)


def plant():
    """Let every part of the probe raise, below the functions that keep the training from it."""

    def planted(*arguments, **options):
        raise RuntimeError("planted")

    for name, module in list(sys.modules.items()):
        if not name.startswith(("_ddpdoctor.probe.", "_ddpdoctor.record.")):
            continue
        for owner in list(vars(module).values()):
            if isinstance(owner, type) and owner.__name__ in PLANTED:
                for method, function in list(vars(owner).items()):
                    if callable(function) and not method.startswith("__"):
                        setattr(owner, method, planted)


def patch():
    """Replace what the probe has replaced, as profilers and trackers do."""

    def wrapped(function):
        def replacement(*arguments, **options):
            return function(*arguments, **options)

        return replacement

    for owner, name in (
        (dist, "all_reduce"),
        (DistributedDataParallel, "forward"),
        (torch.autograd, "backward"),
        (torch.Tensor, "backward"),
        (torch, "save"),
        (torch.optim.SGD, "step"),
        (torch.utils.data.dataloader._BaseDataLoaderIter, "__next__"),
    ):
        setattr(owner, name, wrapped(getattr(owner, name)))


MOST_BYTES = 20_000


def wrap_and_drop(count):
    """Wrap, train and drop models; none may be kept alive."""
    alive = []
    for _ in range(count):
        model = DistributedDataParallel(nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        alive.append(weakref.ref(model))
        del model
    gc.collect()
    assert sum(reference() is not None for reference in alive) == 0, "modules leaked"


def kept():
    """How many things the probe's own objects hold, by class and attribute."""
    found = {}
    for one in gc.get_objects():
        if not str(type(one).__module__).startswith("_ddpdoctor."):
            continue
        slots = [name for owner in type(one).__mro__ for name in getattr(owner, "__slots__", ())]
        for name in {*getattr(one, "__dict__", ()), *slots}:
            value = getattr(one, name, None)
            if isinstance(value, (dict, list, set, collections.deque, weakref.WeakKeyDictionary)):
                place = f"{type(one).__qualname__}.{name}"
                found[place] = found.get(place, 0) + len(value)
    return found


def ours_in(snapshot):
    """Bytes that the probe's files have taken and not given back."""
    taken = ((one.traceback[0].filename, one.size) for one in snapshot.statistics("filename"))
    return {file: size for file, size in taken if "/ddpdoctor/" in file}


def thousand_modules():
    """Wrap and drop so many models: the probe may hold no more after them, and take no more memory."""
    wrap_and_drop(100)
    before = kept()
    tracemalloc.start()
    wrap_and_drop(900)
    deadline = time.monotonic() + 60
    while sum(ours_in(tracemalloc.take_snapshot()).values()) >= MOST_BYTES and time.monotonic() < deadline:
        time.sleep(0.1)  # what waits to be taken in is gone after the next heartbeat
    ours = ours_in(tracemalloc.take_snapshot())
    tracemalloc.stop()
    grown = {place: now - before.get(place, 0) for place, now in kept().items() if now > before.get(place, 0) + 20}
    assert not grown, f"the probe holds more and more: {grown}"
    assert sum(ours.values()) < MOST_BYTES, f"the probe takes more and more bytes: {ours}"


def fork():
    """One child leaves at once, one computes before."""
    children = []
    for way in range(2):
        child = os.fork()
        if child == 0:
            if way == 1:
                nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    subprocess.run([sys.executable, "-c", "import torch"], check=True)


def train_beside():
    """Threads that train models of their own: one that is wrapped, now, and two that go on with the job."""

    def train(model, go_on):
        while True:
            model(torch.ones(2, 4)).sum().backward()
            if not go_on:
                return

    wrapped = threading.Thread(target=lambda: train(DistributedDataParallel(nn.Linear(4, 4)), False))
    wrapped.start()
    wrapped.join()
    for _ in range(2):
        threading.Thread(target=train, args=(nn.Linear(4, 4), True), daemon=True).start()


def start_anew():
    """Take the place of this very process, once, as jobs do that set variables for libraries to read at start."""
    if not os.environ.get("AGAIN"):
        # The keys in the launcher's store are used up: rank 0 opens one of its own.
        port = str(int(os.environ["MASTER_PORT"]) % 60_000 + 1_024)
        os.environ.update(AGAIN="1", TORCHELASTIC_USE_AGENT_STORE="False", MASTER_PORT=port)
        with suppress(RuntimeError):
            dist.barrier()
        os.execv(sys.executable, [sys.executable, *sys.argv])


def harm():
    if HARM == "planted exceptions":
        plant()
    elif HARM == "patched functions":
        patch()
    elif HARM == "forks":
        fork()
    elif HARM == "threads":
        train_beside()
    elif HARM == "many modules":
        thousand_modules()
    elif HARM == "re-exec in training":
        start_anew()


def take_in(digest, model):
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())


def leave(rank, digest):
    """Write what was trained, and end the process without another word."""
    with open(f"{OUTPUT}.{rank}", "w") as file:
        file.write(digest.hexdigest())
    os._exit(0)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    digest = hashlib.sha256()
    for number, make in enumerate(MODELS):
        torch.manual_seed(number)
        data = TensorDataset(torch.randn(STEPS * 16, 64), torch.randint(0, 4, (STEPS * 16,)))
        loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data), num_workers=number % 2)
        model = DistributedDataParallel(make())
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for step, (inputs, targets) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == 3:
                dist.all_reduce(loss.detach())
            if (number, step) == (1, 2):
                state = torch.get_rng_state()
                harm()
                torch.set_rng_state(state)
                dist.barrier()
        take_in(digest, model)
        torch.save(model.state_dict(), f"{OUTPUT}.{rank}.pt")
    leave(rank, digest)


main()
