"""Jobs that hang, started by plain torchrun; the line of the rank that the others wait for ends in ``# here``."""

from __future__ import annotations

import textwrap

import msgspec

HEAD = """
import os, queue, signal, socket, subprocess, sys, threading, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

def about_to_hang():
    print("about to hang", flush=True)

class Stuck(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return os.read(os.pipe()[0], 1)  # worker

def train(rank, model, value):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
"""
MAIN = """
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DDP(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
value = torch.ones(2)
train(rank, model, value)
about_to_hang()
"""


class Hang(msgspec.Struct, frozen=True, kw_only=True):
    """One job that hangs."""

    name: str
    body: str
    culprit: int = 1
    ranks: int = 3

    @property
    def script(self) -> str:
        """The whole script."""
        return f"{HEAD}\n{MAIN}\n{textwrap.dedent(self.body)}"

    @property
    def worker_line(self) -> int:
        """The line on which a worker of a loader stands."""
        return next(n for n, line in enumerate(self.script.splitlines(), 1) if line.endswith("# worker"))

    @property
    def line(self) -> int:
        """The line on which the culprit stands."""
        return next(n for n, line in enumerate(self.script.splitlines(), 1) if line.endswith("# here"))


def _stands(name: str, code: str, *, then: str = "dist.barrier()", culprit: int = 1) -> Hang:
    """The culprit runs ``code``, the others go on to a collective."""
    own = textwrap.indent(textwrap.dedent(code).strip("\n"), "    ")
    return Hang(name=name, body=f"if rank == {culprit}:\n{own}\n{then}\n", culprit=culprit)


BACKWARD = "model(torch.randn(4, 8)).sum().backward()"
HANGS: tuple[Hang, ...] = (
    _stands("sleeps", "time.sleep(300)  # here"),
    _stands("sleeps-before-backward", "time.sleep(300)  # here", then=BACKWARD),
    _stands("sleeps-before-forward", "time.sleep(300)  # here", then="model(torch.randn(4, 8))", culprit=0),
    _stands("lock", "lock = threading.Lock()\nlock.acquire()\nlock.acquire()  # here", then="dist.all_reduce(value)"),
    _stands("queue", "queue.Queue().get()  # here", then="dist.broadcast(value, 0)", culprit=0),
    _stands("event", "threading.Event().wait()  # here"),
    _stands("joins-a-thread", "one = threading.Timer(300, print)\none.start()\none.join()  # here"),
    _stands("pipe", "reader, writer = os.pipe()\nos.read(reader, 1)  # here", culprit=2),
    _stands("socket", "server = socket.create_server(('127.0.0.1', 0))\nserver.accept()  # here"),
    _stands("child", "child = subprocess.Popen(['sleep', '300'])\nchild.wait()  # here", then="dist.all_reduce(value)"),
    _stands("reads-stdin", "left, right = socket.socketpair()\nleft.recv(1)  # here", culprit=2),
    _stands("polls-a-file", "while not os.path.exists('/nowhere/at/all'):\n    time.sleep(5)  # here"),
    _stands("paused", "signal.pause()  # here", then="dist.all_reduce(value)", culprit=2),
    _stands("condition", "condition = threading.Condition()\nwith condition:\n    condition.wait()  # here"),
    _stands("inner-function", "def load():\n    time.sleep(300)  # here\ndef evaluate():\n    load()\nevaluate()"),
    _stands("barrier-of-one", "dist.barrier()  # here", then="dist.all_reduce(value)"),
    _stands("broadcast-of-one", "dist.broadcast(value, 2)  # here", then="dist.barrier()"),
    _stands("gather-of-one", "dist.all_gather([value, value, value], value)  # here", then="dist.barrier()"),
    _stands("group-of-one", "dist.new_group([0, 1])  # here", then="dist.barrier()"),
    _stands("loader", "for batch in torch.utils.data.DataLoader(Stuck(), num_workers=2):  # here\n    pass"),
    _stands("lone-backward", f"{BACKWARD}  # here", then="dist.barrier()", culprit=2),
)
