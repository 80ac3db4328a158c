"""The script that the table of restarts is built of: it resumes as it should, and a fault replaces one of its parts."""

from __future__ import annotations

import textwrap

import msgspec

_JOB = """
import argparse, os, random, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

parser = argparse.ArgumentParser()
OPTION
parser.add_argument("--epochs", type=int, default=6)
args = parser.parse_args()

class Samples(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(64, 8, generator=generator), torch.randn(64, 3, generator=generator)
    def __len__(self): return 64
    def __getitem__(self, index): return self.x[index], self.y[index]

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(3)
sampler = SAMPLER
loader = DataLoader(Samples(), 4, sampler=sampler)
net = NET
model = DDP(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.7**epoch)
ema = {name: value.detach().clone() for name, value in net.state_dict().items()}
start_epoch, global_step = 0, 0

def save(epoch):
    SAVE

def load(path):
    global start_epoch, global_step
    LOAD
    MODEL
    OPTIMIZER
    SCHEDULER
    EMA
    COUNT

RESUME
for epoch in range(start_epoch, args.epochs):
    EPOCH
    for x, y in loader:
        optimizer.zero_grad()
        loss = LOSS
        loss.backward()
        optimizer.step()
        global_step += 1
        for name, value in net.named_parameters(): ema[name].lerp_(value.detach(), 0.1)
        STEP
    scheduler.step()
    if rank == 0: save(epoch)
    dist.barrier()
time.sleep(0.2)
dist.destroy_process_group()
"""
RIGHT = {
    "OPTION": 'parser.add_argument("--resume", default="")',
    "SAMPLER": "DistributedSampler(Samples(), shuffle=True, seed=5)",
    "NET": "nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))",
    "LOSS": "F.mse_loss(model(x), y)",
    "SAVE": """
torch.save({
    "model": net.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
    "ema": ema, "epoch": epoch, "global_step": global_step,
}, "last.new")
os.replace("last.new", "last.pt")
""",
    "LOAD": 'state = torch.load(path, map_location="cpu", weights_only=False)  # load',
    "MODEL": 'net.load_state_dict(state["model"])',
    "OPTIMIZER": 'optimizer.load_state_dict(state["optimizer"])',
    "SCHEDULER": 'scheduler.load_state_dict(state["scheduler"])',
    "EMA": '[ema[name].copy_(value) for name, value in state["ema"].items()]',
    "COUNT": 'start_epoch = state["epoch"] + 1\nglobal_step = state["global_step"]',
    "RESUME": "if args.resume: load(args.resume)",
    "EPOCH": "sampler.set_epoch(epoch)",
    "STEP": "pass",
}


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A script and what must be said of its second start."""

    script: str
    words: tuple[str, ...] = ()
    """What the findings say, each in one of them; empty for a script that resumes as it should."""
    line: int = 0
    """Where the first finding is; 0 for anywhere."""
    inconclusive: str = ""
    """Words of the reason, where nothing can be said."""
    resume_with: str | None = None
    torn: bool = False
    """Started once more after a save that was broken off."""
    ranks: int = 0
    """Ranks of the second start; 0 for as many as the first has."""


def script_of(**parts: str) -> str:
    """Return the script with some parts replaced."""
    text = _JOB
    for name, right in RIGHT.items():
        at = next(line for line in text.splitlines() if line.strip() == name or f"= {name}" in line)
        indent = at[: len(at) - len(at.lstrip())]
        lines = textwrap.indent(parts.get(name, right).strip("\n"), indent) if at.strip() == name else None
        text = text.replace(at, at.replace(name, parts.get(name, right)) if lines is None else lines)
    return text


def case_of(*words: str, at: str = "# load", resume_with: str | None = None, torn: bool = False, **parts: str) -> Case:
    """Return a case of such a script, with the line that holds ``at``."""
    script = script_of(**parts)
    line = next((number for number, line in enumerate(script.splitlines(), 1) if at in line), 0) if words else 0
    return Case(script=script, words=words, line=line, resume_with=resume_with, torn=torn)
