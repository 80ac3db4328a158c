"""Faults that hang a job, kill it or make it wrong: one list for the tests and for the table of the benchmark."""

from __future__ import annotations

from typing import Literal

import msgspec

from tests.faults.script import training_script, whole_script

Basis = Literal["proof", "strong", "bounded"]


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault, and what must be said of it."""

    script: str
    """Lines that end in ``# here`` must be among the places of the finding."""
    code: str
    """The one finding of the run; empty where the rehearsal has to be inconclusive."""
    severity: str = "error"
    culprit: int | None = None
    """The rank that must be named; None where both next lines have to be shown."""
    either: bool = False
    """The culprit may be named, or both lines shown: what is known depends on which rank came first."""
    ranks: int = 2
    basis: Basis = "proof"
    """``proof``, ``strong`` (a rank that stands), or ``bounded`` (ends by the time limit)."""
    time_limit_s: float = 120.0
    says: str = ""
    """Words that the title, or the reason of an inconclusive rehearsal, must hold."""
    quick: bool = False
    """Also run by the tests."""


NORM = "nn.BatchNorm1d(8)"

_ORDER = """
if rank == 1 and step == 3:
    fault()
    dist.broadcast(value, src=0)  # here
    dist.all_reduce(value)
else:
    dist.all_reduce(value)  # here
    dist.broadcast(value, src=0)
"""
_SWAPPED = """
def add_loss(): dist.all_reduce(value)  # here
def add_hits(): dist.all_reduce(other)  # here
steps = [add_loss, add_hits]
if rank == 1 and step == 3:
    fault()
    steps.reverse()
for add in steps: add()
"""
_LONE_FORWARD = """
if rank == 0 and step == 3 and fault():
    with torch.set_grad_enabled(GRADIENTS):
        model(x)  # here
"""
_TWO_GROUPS = """
if rank == 1 and step == 3:
    fault()
    dist.all_reduce(value, group=pair_again)  # here
    dist.all_reduce(value, group=pair)
else:
    dist.all_reduce(value, group=pair)  # here
    dist.all_reduce(value, group=pair_again)
"""
_TRAIN_ON_LOADER = """
class Samples(Dataset):
    def __init__(self, length): self.length = length
    def __len__(self): return self.length
    def __getitem__(self, index):
        SAMPLE
        return torch.randn(8)

def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    LOADER
    model = DDP(nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        EPOCH
        for step, x in enumerate(loader):
            optimizer.zero_grad()
            BATCH
            model(x).sum().backward()
            optimizer.step()
        EPOCH_END
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""
_SHARDED = """sampler = DistributedSampler(Samples(32), shuffle=False)
    loader = DataLoader(sampler.dataset, 4, sampler=sampler, num_workers=WORKERS)"""


def on_loader(**lines: str) -> str:
    """A script that trains on a sharded loader, with a case's lines at their places."""
    text = _TRAIN_ON_LOADER.replace("LOADER", lines.pop("loader", _SHARDED))
    text = text.replace("WORKERS", lines.pop("workers", "0"))
    for place in ("SAMPLE", "EPOCH_END", "EPOCH", "BATCH"):
        text = text.replace(place, lines.get(place.lower(), "pass"))
    return whole_script(text)


_SPAWN = """
import torch.multiprocessing as mp

def work(rank, size):
    store = f"file://{os.path.abspath(sys.argv[0])}.store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    model = DDP(nn.Linear(8, 3))
    WORK
    for step in range(4):
        model(torch.randn(4, 8)).sum().backward()

if __name__ == "__main__":
    mp.spawn(work, args=(2,), nprocs=NPROCS)
"""

_BROKEN_FUNCTION = """
class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        fault()
        raise ValueError("no gradient")  # here
if rank == 1 and step == 2: loss = Broken.apply(loss)
"""
_BROKEN_OPTIMIZER = """
class Broken(torch.optim.SGD):
    def step(self):
        if rank == 1 and step == 2 and fault(): raise ValueError("no state")  # here
        super().step()
optimizer = Broken(model.parameters(), lr=0.1)
"""
_STUCK_SAVE = """
def save():
    fault()
    time.sleep(10_000)  # here
if rank == 0 and step == 2: save()
"""
_ASKS_IN_VAIN = """
if step == 3:
    if rank == 0:
        dist.barrier()  # here
        with open("ready.new", "w") as file: file.write("yes")
        os.replace("ready.new", "ready")
    else:
        fault()
        while not os.path.exists("ready"): time.sleep(0.05)
        dist.barrier()
"""
_LOCK = """
def tokenise():
    lock = threading.Lock()
    with lock:
        fault()
        lock.acquire()  # here
if rank == 1 and step == 2: tokenise()
"""
_PORT_IN_USE = """
import random
server = socket.socket()
fault()
server.bind(("127.0.0.1", random.Random(os.environ["TORCHELASTIC_RUN_ID"] + os.getcwd()).randrange(20_000, 30_000)))
server.listen()
"""

FAULTS: dict[str, Fault] = {
    "extra collective on rank 0": Fault(
        script=training_script(within="if rank == 0 and step == 4 and fault(): dist.all_reduce(value)  # here"),
        code="DDP301",
        culprit=0,
    ),
    "missing collective on rank 1": Fault(
        script=training_script(
            within="if rank == 1 and step == 3: fault()\nif rank == 0 or step < 3: dist.all_reduce(value)  # here"
        ),
        code="DDP301",
        culprit=1,
    ),
    "two collectives in another order": Fault(script=training_script(within=_ORDER), code="DDP301", culprit=1),
    "another shape": Fault(
        script=training_script(within="fault(); dist.all_reduce(torch.ones(2 + rank))  # here"),
        code="DDP304",
        quick=True,
    ),
    "another dtype": Fault(
        script=training_script(within="fault(); dist.all_reduce(value.double() if rank else value)  # here"),
        code="DDP304",
    ),
    "another reduce operation": Fault(
        script=training_script(
            within="fault(); dist.all_reduce(value, op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)  # here"
        ),
        code="DDP304",
    ),
    "another root": Fault(
        script=training_script(within="fault(); dist.broadcast(value, src=rank)  # here"), code="DDP304"
    ),
    "another group": Fault(
        script=training_script(
            after_wrap="pair = dist.new_group([0, 1])",
            within="if step == 2: fault(); dist.all_reduce(value, group=pair if rank else None)  # here",
        ),
        code="DDP304",
        says="group",
        quick=True,
    ),
    "rank 0 forward, buffers, gradients": Fault(
        script=training_script(NORM, within=_LONE_FORWARD.replace("GRADIENTS", "True")), code="DDP303", culprit=0
    ),
    "rank 0 forward, buffers, no gradients": Fault(
        script=training_script(NORM, within=_LONE_FORWARD.replace("GRADIENTS", "False")),
        code="DDP303",
        severity="warning",
        culprit=0,
        quick=True,
    ),
    "skipped backward on rank 1": Fault(
        script=training_script(between="if rank == 1 and step == 2 and fault(): continue"),
        code="DDP301",
        culprit=1,
        quick=True,
    ),
    "a step left out on rank 1 before its forward": Fault(
        script=training_script(within="if rank == 1 and step == 2 and fault(): continue", after="dist.barrier()"),
        code="DDP301",
        culprit=1,
    ),
    "skipped backward on both, other steps": Fault(
        script=training_script(between="if step == 2 + rank and fault(): continue"), code="DDP312", either=True
    ),
    "continue on a bad loss": Fault(
        script=training_script(
            between="if step == 2: loss = loss * (float('nan') if rank else 1)\nif loss.isnan() and fault(): continue"
        ),
        code="DDP312",
        culprit=1,
    ),
    "continue on a bad batch": Fault(
        script=on_loader(
            sample="if torch.utils.data.get_worker_info() is None and index == 9: return torch.full((8,), 9.0)",
            batch="if x.max() > 8 and fault(): continue  # here",
            epoch_end="dist.barrier()",
        ),
        code="DDP302",
        culprit=1,
        quick=True,
    ),
    "uneven loaders": Fault(
        script=on_loader(
            loader="loader = DataLoader(Samples(12 - 4 * rank), 4)  # here",
            epoch_end="if rank == 1: fault()",
        ),
        code="DDP103",
        either=True,
        quick=True,
    ),
    "loss keys of the batch": Fault(
        script=training_script(
            within="losses = {'a': value, 'b': value} if rank == 0 or step != 3 else {'a': value}\n"
            "if step == 3: fault()\n"
            "for key in losses: dist.all_reduce(losses[key])  # here"
        ),
        code="DDP302",
        either=True,
    ),
    "early return": Fault(
        script=training_script(within="if rank == 1 and step == 2 and fault(): return"), code="DDP301", culprit=1
    ),
    "exception in a dataset worker": Fault(
        script=on_loader(
            workers="1",
            sample="if index == 9 and fault(): raise ValueError('damaged sample')",
            batch="pass",
        ),
        code="DDP706",
        culprit=1,
    ),
    "exception in forward": Fault(
        script=training_script(
            forward="if dist.get_rank() == 1 and x.max() > 90 and fault(): raise ValueError('too large')  # here",
            within="if rank == 1 and step == 2: x = x + 99",
        ),
        code="DDP706",
        culprit=1,
        quick=True,
    ),
    "exception in backward": Fault(script=training_script(between=_BROKEN_FUNCTION), code="DDP706", culprit=1),
    "exception in the optimizer": Fault(script=training_script(after_wrap=_BROKEN_OPTIMIZER), code="DDP706", culprit=1),
    "sys.exit(3)": Fault(
        script=training_script(within="if rank == 1 and step == 2 and fault(): sys.exit(3)"), code="DDP301", culprit=1
    ),
    "os._exit(0)": Fault(
        script=training_script(within="if rank == 1 and step == 2 and fault(): os._exit(0)"),
        code="DDP301",
        culprit=1,
        quick=True,
    ),
    "SIGKILL": Fault(
        script=training_script(within="if rank == 1 and step == 2 and fault(): os.kill(os.getpid(), 9)"),
        code="DDP306",
        culprit=1,
        quick=True,
    ),
    "SIGSTOP": Fault(
        script=training_script(within="if rank == 1 and step == 2 and fault(): os.kill(os.getpid(), 19)"),
        code="DDP305",
        culprit=1,
        basis="strong",
    ),
    "a C call holds the interpreter": Fault(
        script=training_script(
            within="if rank == 1 and step == 2 and fault(): __import__('ctypes').PyDLL(None).sleep(10_000)  # here"
        ),
        code="DDP305",
        culprit=1,
        basis="strong",
    ),
    "a lock is never released": Fault(
        script=training_script(within=_LOCK), code="DDP305", culprit=1, basis="strong", quick=True
    ),
    "a rank sleeps in a save": Fault(
        script=training_script(within=_STUCK_SAVE), code="DDP305", culprit=0, basis="strong", says="sleeps"
    ),
    "a rank polls for what its peer makes later": Fault(
        script=training_script(within=_ASKS_IN_VAIN),
        code="DDP305",
        severity="warning",
        culprit=1,
        basis="strong",
        says="polls",
        quick=True,
    ),
    "an infinite loop": Fault(
        script=training_script(
            within="def search():\n    fault()\n    while True: pass\nif rank == 1 and step == 2: search()"
        ),
        code="",
        culprit=1,
        basis="bounded",
        time_limit_s=15.0,
        says="rank 1 is at train.py",
    ),
    "new_group on a subset": Fault(
        script=training_script(after_wrap="if rank == 0 and fault(): dist.new_group([0, 1])  # here"),
        code="DDP309",
        culprit=None,
        either=True,
        quick=True,
    ),
    "DDP on a subset": Fault(
        script=training_script(
            after_wrap="pass",
            before="if rank == 1:\n    fault()\n    net = Net()\n    for step in range(4): "
            "net(torch.randn(4, 8)).sum().backward()\n    dist.barrier()  # here\n    return",
        ),
        code="DDP314",
        either=True,
    ),
    "barrier in one branch": Fault(
        script=training_script(after="if rank == 0 and fault(): dist.barrier()  # here"), code="DDP306", either=True
    ),
    "two groups in opposite order": Fault(
        script=training_script(
            after_wrap="pair, pair_again = dist.new_group([0, 1]), dist.new_group([0, 1])", within=_TWO_GROUPS
        ),
        code="DDP301",
        says="wait for each other",
        quick=True,
    ),
    "receive against receive": Fault(
        script=training_script(within="if step == 2:\n    fault()\n    dist.recv(value, 1 - rank)  # here"),
        code="DDP305",
        says="wait for each other",
        quick=True,
    ),
    "a spawned worker raises": Fault(
        script=whole_script(
            _SPAWN.replace("NPROCS", "2").replace("WORK", "if rank == 1 and fault(): raise ValueError('shard')  # here")
        ),
        code="DDP706",
        culprit=1,
    ),
    "mp.spawn with no worker": Fault(
        script=whole_script(_SPAWN.replace("NPROCS", "int(os.environ.get('WORKERS', 0))").replace("WORK", "pass")),
        code="",
        basis="bounded",
        says="started no rank",
    ),
    "port in use": Fault(
        script=training_script(after_wrap=_PORT_IN_USE),
        code="DDP706",
        either=True,
        says="Address already in use",
    ),
    "different models": Fault(
        script=training_script(
            forward="pass",
            before="if rank == 1: Net.__init__ = (lambda make: lambda net: (make(net), setattr(net, 'third', "
            "nn.Linear(8, 8)), None)[-1])(Net.__init__)\nfault()",
        ),
        code="DDP304",
        either=True,
        says="different models",
        basis="strong",
    ),
    "swapped same-shape calls": Fault(
        script=training_script(after_wrap="other = torch.ones(2)", within=_SWAPPED), code="DDP312", severity="warning"
    ),
    "one loop in two orders": Fault(
        script=training_script(
            within="stats = {'loss': value - 1, 'hits': value + 1}\nif rank == 1 and step == 3 and fault():\n"
            "    stats = dict(reversed(stats.items()))\n"
            "def add(statistic): dist.all_reduce(statistic)  # here\nfor statistic in stats.values(): add(statistic)"
        ),
        code="DDP312",
        says="pairs stats['loss'] of rank 0 with stats['hits'] of rank 1",
        quick=True,
    ),
    "unused on one rank": Fault(
        script=training_script(within="both = not (rank == 1 and step == 2 and fault())"), code="DDP201", culprit=1
    ),
    "a wait beyond the timeout": Fault(
        script=training_script(
            after_wrap="from datetime import timedelta\nfast = dist.new_group([0, 1], timeout=timedelta(seconds=4))",
            within="if step == 2:\n    fault()\n    end = time.monotonic() + (60 if rank else 0)\n"
            "    while time.monotonic() < end: sum(range(1000))\n    dist.barrier(group=fast)  # here",
        ),
        code="DDP307",
        culprit=1,
        basis="strong",
    ),
    "extra collective on rank 1 of 3": Fault(
        script=training_script(within="if rank == 1 and step == 4 and fault(): dist.all_reduce(value)  # here"),
        code="DDP301",
        culprit=1,
        ranks=3,
        quick=True,
    ),
    "another shape on rank 2 of 3": Fault(
        script=training_script(within="fault(); dist.all_reduce(torch.ones(3 if rank == 2 else 2))  # here"),
        code="DDP304",
        culprit=2,
        ranks=3,
    ),
    "new_group by two of 3": Fault(
        script=training_script(after_wrap="if rank != 1 and fault(): dist.new_group([0, 1])  # here"),
        code="DDP309",
        either=True,
        ranks=3,
    ),
    "early return of rank 2 of 3": Fault(
        script=training_script(within="if rank == 2 and step == 2 and fault(): return"),
        code="DDP301",
        culprit=2,
        ranks=3,
    ),
    "receives in a ring of 3": Fault(
        script=training_script(within="if step == 2:\n    fault()\n    dist.recv(value, (rank + 1) % 3)  # here"),
        code="DDP305",
        says="wait for each other",
        ranks=3,
    ),
}
