"""A job that meets harm in its middle: trains three models on two ranks and tells the digest of their weights.

Usage: job.py HARM OUTPUT. What happens to the run directory, to torch or to the process is done by the job itself, at a
step that is always the same.
"""

import gc
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

HARM, OUTPUT = sys.argv[1:3]
RUN = os.environ.get("DDPDOCTOR_RUN", "")
STEPS = 8
PLANTED = ("Steps", "Stopwatch", "Reductions", "Evidence", "Flights", "GroupBook", "NumberedRing", "UserCode")


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


def files(ending):
    return [os.path.join(RUN, name) for name in os.listdir(RUN) if name.endswith(ending)]


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


def thousand_modules():
    """Wrap and drop many models; none may be kept alive."""
    alive = []
    for _ in range(500):
        model = DistributedDataParallel(nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        alive.append(weakref.ref(model))
        del model
    gc.collect()
    assert sum(reference() is not None for reference in alive) == 0, "modules leaked"


def harm(rank):
    if HARM == "deleted" and rank == 0:
        shutil.rmtree(RUN)
    elif HARM == "read-only" and rank == 0:
        os.chmod(RUN, 0o500)
    elif HARM == "full":
        with open(os.path.join(RUN, f"ballast-{rank}"), "wb") as file:
            try:
                while True:
                    file.write(bytes(1 << 16))
                    file.flush()
            except OSError:
                pass
    elif HARM == "truncated":
        for path in files(".ring"):
            os.truncate(path, 0)
    elif HARM == "garbage":
        for path in files(".ring") + files(".jsonl"):
            with open(path, "r+b") as file:
                file.write(os.urandom(400_000))
    elif HARM == "planted exceptions":
        plant()
    elif HARM == "patched functions":
        patch()
    elif HARM == "settrace":
        sys.settrace(lambda frame, event, argument: None)
    elif HARM == "forks":
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
    elif HARM == "threads":
        thread = threading.Thread(target=lambda: MODELS[0]()(torch.ones(2, 64)).sum().backward())
        thread.start()
        thread.join()
    elif HARM == "many modules":
        thousand_modules()


def main():
    if HARM == "re-exec" and not os.environ.get("AGAIN"):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "AGAIN": "1"})
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
                harm(rank)
                torch.set_rng_state(state)
                dist.barrier()
        for tensor in model.state_dict().values():
            digest.update(tensor.numpy().tobytes())
        torch.save(model.state_dict(), f"{OUTPUT}.{rank}.pt")
    with open(f"{OUTPUT}.{rank}", "w") as file:
        file.write(digest.hexdigest())
    os._exit(0)


main()
