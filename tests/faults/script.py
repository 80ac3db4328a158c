"""The training script that faults are put into, and what is put around them to know when they strike."""

from __future__ import annotations

import textwrap

STAMPS_VARIABLE = "FAULT_STAMPS"
"""Path of a datagram socket; ``fault()`` in a script sends the time of the monotonic clock to it."""

HEAD = f"""
import os, signal, socket, sys, threading, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

def fault():
    if "{STAMPS_VARIABLE}" in os.environ:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stamps:
            stamps.sendto(str(time.monotonic_ns()).encode(), os.environ["{STAMPS_VARIABLE}"])
    return True
"""

# The sleep before the end: torch 2.13 can stand for good where gloo's thread has not let go of the last backward then.
TRAINING = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)
        self.norm = NORM
    def forward(self, x, both=True):
        FORWARD
        return self.second(self.norm(self.first(x))) if both else self.norm(self.first(x))

def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    BEFORE
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    value = torch.ones(2)
    AFTER_WRAP
    for step in range(6):
        both = True
        x = torch.randn(4, 8)
        optimizer.zero_grad()
        WITHIN
        loss = model(x, both).sum()
        BETWEEN
        loss.backward()
        optimizer.step()
        END_OF_STEP
    AFTER
    time.sleep(0.2)
    dist.destroy_process_group()

main()
"""
"""Six steps without a loader; words in capitals are the places where a case puts its lines."""

PLACES = ("FORWARD", "BEFORE", "AFTER_WRAP", "WITHIN", "BETWEEN", "END_OF_STEP", "AFTER")


def training_script(norm: str = "nn.Identity()", **lines: str) -> str:
    """The script with a case's lines at their places, given by the name of the place in lower case."""
    text = TRAINING.replace("NORM", norm)
    filled = []
    for line in text.splitlines():
        place = line.strip()
        if place in PLACES:
            indent = line[: len(line) - len(place)]
            filled.append(textwrap.indent(textwrap.dedent(lines.get(place.lower(), "pass")).strip("\n"), indent))
        else:
            filled.append(line)
    return HEAD + "\n".join(filled) + "\n"


def whole_script(body: str) -> str:
    """A script of its own, behind the usual imports."""
    return HEAD + textwrap.dedent(body)
