"""Values that are not finite, put into a job of three ranks, with what must be said of each; and healthy jobs."""

from __future__ import annotations

import textwrap
from typing import Literal

import msgspec

Kind = Literal["forward", "backward", "data", "optimizer"]

RANKS = 3
HEAD = """
import os, sys, time, torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
"""
JOB = """
now = -1

def strikes(): return rank == RANK and now == STEP

class Guard(nn.Module):
    def forward(self, h):
        GUARD
        return h

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.guard, self.norm, self.last = nn.Linear(8, 8), Guard(), nn.LayerNorm(8), nn.Linear(8, 3)
    def forward(self, x):
        return self.last(self.norm(self.guard(torch.tanh(self.first(x)))))

class Samples(torch.utils.data.Dataset):
    def __init__(self): self.x, self.y = torch.randn(96, 8), torch.randn(96, 3)
    def __len__(self): return 96
    def __getitem__(self, index):
        x, y = self.x[index], self.y[index]
        SAMPLE
        return x, y

data = Samples()
sampler = DistributedSampler(data, shuffle=False)
loader = DataLoader(data, 4, sampler=sampler)
model = DDP(Net())
optimizer = OPTIMIZER
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        now += 1
        BEFORE
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        LOSS
        loss.backward()
        CLIP
        optimizer.step()
        AFTER
time.sleep(0.2)
dist.destroy_process_group()
"""


class Injection(msgspec.Struct, frozen=True, kw_only=True):
    """A value that is not finite, and what must be said of it."""

    script: str
    rank: int
    step: int
    """The step that must be named, from 1."""
    kind: Kind
    words: tuple[str, ...]
    """All of them in the finding."""


def _script(rank: int, step: int, **places: str) -> str:
    """The job with lines at their places; ``step`` is counted from 0."""
    text = JOB
    places = {"optimizer": "torch.optim.SGD(model.parameters(), lr=0.05)", **places}
    for name in ("GUARD", "SAMPLE", "OPTIMIZER", "BEFORE", "LOSS", "CLIP", "AFTER"):
        lines = places.get(name.lower(), "pass")
        at = next(line for line in text.splitlines() if name in line)
        indent = at[: len(at) - len(at.lstrip())]
        filled = at.replace(name, lines) if at.strip() != name else textwrap.indent(textwrap.dedent(lines), indent)
        text = text.replace(at, filled)
    return HEAD + text.replace("RANK", str(rank)).replace("STEP", str(step))


# A sample's index on a rank in a step, with batches of 4 that three ranks draw in turn, without shuffling.
def _sample(rank: int, step: int, row: int) -> int:
    return (step % 8 * 4 + row) * RANKS + rank


_FORWARD: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("h = torch.sqrt(h - (9 if strikes() else -2))", ("`sqrt`", "`guard`")),
    ("h = torch.log(h - (9 if strikes() else -2))", ("`log`", "`guard`")),
    ("h = h / (h * (0 if strikes() else 0) + (0 if strikes() else 1)) * 1", ("`guard`",)),
)
_BACKWARD = (
    ("h = h + torch.sqrt(torch.relu(h) * (0 if strikes() else 1) + (0 if strikes() else 1))", "first.bias"),
    ("h = h + (h * (0 if strikes() else 1) + (0 if strikes() else 1)).pow(0.5)", "first.bias"),
    (
        "class Bad(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, h): return h.clone()\n"
        "    @staticmethod\n"
        "    def backward(ctx, g): return g * (float('nan') if strikes() else 1)\n"
        "h = Bad.apply(h)",
        "first.bias",
    ),
)
_DATA = (
    "if epoch == EPOCH and index == INDEX: x = x.clone(); x[3] = float('nan')",
    "if epoch == EPOCH and index == INDEX: y = y.clone(); y[1] = float('nan')",
    "if epoch == EPOCH and index == INDEX: x = x.clone(); x[0] = float('inf')",
)
_OPTIMIZER = (
    (
        {"clip": "if strikes(): optimizer.param_groups[0]['lr'] = float('inf')"},
        ("learning rate inf", "finite gradients"),
    ),
    ({"clip": "if strikes(): optimizer.param_groups[0]['weight_decay'] = float('nan')"}, ("finite gradients",)),
    (
        {
            "optimizer": "torch.optim.Adam(model.parameters(), lr=0.01, eps=0)",
            "clip": "if strikes(): [s['exp_avg_sq'].fill_(-1) for s in optimizer.state.values()]",
        },
        ("finite gradients",),
    ),
)
STEPS = (2, 5, 11)


def injections() -> dict[str, Injection]:
    """36 of them: a kind, on each rank, in each of three steps, each step by other means; six shapes of backwards."""
    found: dict[str, Injection] = {}
    for rank in range(RANKS):
        for number, step in enumerate(STEPS):
            guard, words = _FORWARD[number]
            found[f"forward {number} on rank {rank} in step {step + 1}"] = Injection(
                script=_script(rank, step, guard=guard), rank=rank, step=step + 1, kind="forward", words=words
            )
            guard, parameter = _BACKWARD[number]
            found[f"backward {number} on rank {rank} in step {step + 1}"] = Injection(
                script=_script(rank, step, guard=guard),
                rank=rank,
                step=step + 1,
                kind="backward",
                words=("the loss was finite", parameter),
            )
            sample = _DATA[number].replace("EPOCH", str(step // 8))
            sample = sample.replace("INDEX", str(_sample(rank, step, 1)))
            found[f"data {number} on rank {rank} in step {step + 1}"] = Injection(
                script=_script(rank, step, sample=sample),
                rank=rank,
                step=step + 1,
                kind="data",
                words=("batch of rank", f"sample {_sample(rank, step, 1)}"),
            )
            places, words = _OPTIMIZER[number]
            found[f"optimizer {number} on rank {rank} in step {step + 1}"] = Injection(
                script=_script(rank, step, **places), rank=rank, step=step + 1, kind="optimizer", words=words
            )
    return found | {name: _changed(*one) for name, one in _SHAPES.items()}


_BAD = """
class Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h): return h.clone()
    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        if strikes() and not torch.is_grad_enabled(): g[:, COLUMNS] = float('nan')
        return g
h = Bad.apply(h)
"""
_LAYERS = "nn.Linear(8, 8), Guard(), nn.LayerNorm(8), nn.Linear(8, 3)"
_WIDE = "nn.Linear(8, 64), Guard(), nn.LayerNorm(64), nn.Linear(64, 3)"
_TABLE = "nn.EmbeddingBag(96, 8), Guard(), nn.LayerNorm(8), nn.Linear(8, 3)"
_SHAPES: dict[str, tuple[str, str, dict[str, str], dict[str, str]]] = {
    "one column of many": ("40", "first.bias", {_LAYERS: _WIDE}, {}),
    "the rows of a table": (
        "2",
        "first.weight",
        {_LAYERS: _TABLE, "model(x)": "model(x.abs().mul(9).long() + 40)"},
        {},
    ),
    "gradients that are clipped": (
        "5",
        "first.bias",
        {},
        {"clip": "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"},
    ),
    "gradients of gradients": (
        "5",
        "first.bias",
        {},
        {
            "before": "taken = torch.autograd.grad(model.module(x).sum(), list(model.parameters()), create_graph=True)",
            "loss": "loss = loss + 1e-3 * sum(one.square().sum() for one in taken)",
        },
    ),
    "half the bits": (
        "5",
        "first.bias",
        {"DDP(Net())": "DDP(Net().bfloat16())", "model(x), y": "model(x.bfloat16()).float(), y"},
        {},
    ),
    "two modules": (
        "5",
        "first.bias",
        {"model = DDP(Net())": "other = DDP(nn.Linear(3, 3)); model = DDP(Net())", "model(x), y": "other(model(x)), y"},
        {},
    ),
}
"""Columns of a gradient that is not finite, the first parameter that has one, changes of the job, and its lines."""


def _changed(columns: str, parameter: str, changes: dict[str, str], lines: dict[str, str]) -> Injection:
    script = _script(1, 5, guard=_BAD.replace("COLUMNS", columns), **lines)
    for old, new in changes.items():
        assert old in script
        script = script.replace(old, new)
    words = ("the loss was finite", parameter)
    return Injection(script=script, rank=1, step=6, kind="backward", words=words)


_SCALED = """
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** SCALE, growth_interval=GROWTH)
for step in range(24):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16): loss = F.mse_loss(model(torch.randn(4, 8)), torch.randn(4, 3))
    scaler.scale(loss.half() if HALF else loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
_LOOP = """
for step in range(16):
    x, y = torch.randn(4, 8), torch.randn(4, 3)
    X
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    LOSS
    loss.backward()
    STEP
"""


def _loop(x: str = "pass", loss: str = "pass", step: str = "optimizer.step()") -> str:
    text = _LOOP
    for name, lines in (("    X\n", x), ("    LOSS\n", loss), ("    STEP\n", step)):
        text = text.replace(name, textwrap.indent(lines, "    ") + "\n")
    return text


_HEALTHY_LOOPS = {
    "plain": _loop(),
    "scaler that skips at first": _SCALED.replace("SCALE", "40").replace("GROWTH", "2000").replace("HALF", "False"),
    "scaler that skips again and again": _SCALED.replace("SCALE", "30").replace("GROWTH", "2").replace("HALF", "False"),
    "scaler with a loss in float16": _SCALED.replace("SCALE", "17").replace("GROWTH", "2").replace("HALF", "True"),
    "a NaN loss whose step all ranks skip": _loop(
        loss="if step % 5 == 3: loss = loss * float('nan')", step="if step % 5 != 3: optimizer.step()"
    ),
    "a NaN on one rank whose step all skip by the norm": _loop(
        x="if rank == 1 and step == 4: x[0] = float('nan')",
        step="norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)\nif torch.isfinite(norm): optimizer.step()",
    ),
    "gradients whose NaN is replaced": _loop(
        x="if rank == 1 and step == 4: x[0] = float('nan')",
        step="[p.grad.nan_to_num_(0, 0, 0) for p in model.parameters() if p.requires_grad]\noptimizer.step()",
    ),
    "a NaN that is masked before the model": _loop(x="x[0, 0] = float('nan'); x = torch.nan_to_num(x)"),
    "targets that are not known": _loop(loss="loss = F.mse_loss(model(x), torch.where(y > 0, y, y.detach() * 0))"),
    "a NaN in validation": _loop(step="optimizer.step()\nwith torch.no_grad(): model.module(x * float('nan'))"),
    "a loss that is only logged": _loop(loss="history = [float(loss * float('nan'))]", step="optimizer.step()"),
    "an attention mask of -inf": _loop(
        loss="scores = (x @ x.T).masked_fill(torch.triu(torch.ones(4, 4), 1).bool(), float('-inf'))\n"
        "loss = loss + 0 * torch.softmax(scores, -1).sum()"
    ),
    "accumulation": _loop(step="if step % 4 == 3: optimizer.step()", loss="loss = loss / 4"),
    "a step left out by a NaN that is decided before backward": _loop(
        loss="bad = torch.tensor(float(step == 5 and rank == 2)); dist.all_reduce(bad)\nif bad > 0: continue"
    ),
    "a large loss": _loop(
        loss="loss = loss * 1e30", step="nn.utils.clip_grad_norm_(model.parameters(), 0.1)\noptimizer.step()"
    ),
    "large gradients whose sum is too large": _loop(
        loss="loss = loss * 1e37",
        step="[p.grad.clamp_(-1, 1) for p in model.parameters() if p.requires_grad]\noptimizer.step()",
    ),
    "weights set in between": _loop(
        step="optimizer.step()\nwith torch.no_grad(): [p.mul_(0.99) for p in model.parameters()]"
    ),
    "checkpointing": _loop(
        loss="loss = loss + torch.utils.checkpoint.checkpoint(model.module, x, use_reentrant=False).square().mean()"
    ),
    "an anomaly that raises is caught": _loop(
        loss="try:\n    if step == 3: raise ArithmeticError\nexcept ArithmeticError: pass"
    ),
    "a graph that is kept": _loop(loss="(loss * 0.5).backward(retain_graph=True)"),
}
_MODELS = {
    "linear": "nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))",
    "norms": "nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.LayerNorm(8), nn.Linear(8, 3))",
    "a mask that is a parameter": "Masked()",
    "a buffer of NaN": "Padded()",
    "recurrent": "Recurrent()",
}
_CLASSES = """
class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(8, 3)
        self.mask = nn.Parameter(torch.full((8,), float("-inf")), requires_grad=False)
    def forward(self, x): return self.last(torch.maximum(x, self.mask))

class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(8, 3)
        self.register_buffer("seen", torch.full((8,), float("nan")))
    def forward(self, x): return self.last(x)

class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.last = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 3)
    def forward(self, x): return self.last(self.cells(x.unsqueeze(1))[0][:, -1])
"""
_OPTIMIZERS = (
    "torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)",
    "torch.optim.AdamW(model.parameters(), lr=1e-3)",
)


def healthy() -> dict[str, str]:
    """100 trainings of which nothing is to be said: 20 loops, each with five models, one after the other in a job."""
    found = {}
    for number, (name, loop) in enumerate(_HEALTHY_LOOPS.items()):
        bodies = [
            f"model = DDP({model})\noptimizer = {_OPTIMIZERS[(number + at) % 2]}\n{loop}\n"
            for at, model in enumerate(_MODELS.values())
        ]
        end = "time.sleep(0.2)\ndist.destroy_process_group()\n"
        found[name] = HEAD + "import torch.utils.checkpoint\n" + _CLASSES + "\n".join(bodies) + end
    return found
