"""Jobs that build a model without memory for its values, empty it onto a device, and initialise all of it or not.

What each must give was written down before it was first examined.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import msgspec

HEAD = '''
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.up(self.norm(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(32, 8)
        self.layers = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(8, 32)

    def reset_parameters(self):
        self.words.reset_parameters()
        self.head.reset_parameters()

    def forward(self, x):
        x = self.words(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Turned(Net):
    """A table that is computed from nothing but its shape."""

    def __init__(self):
        super().__init__()
        self.register_buffer("angles", self.table())

    def table(self):
        return torch.polar(torch.ones(8), torch.arange(8.0))

    def forward(self, x):
        return super().forward(x) * self.angles.real.sum()


def reset(model):
    for part in model.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()


def shard(model):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
with torch.device("meta"):
    model = Net()
'''
TAIL = """
torch.manual_seed(rank)
optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.01)
for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.randint(0, 32, (4, 6))).square().mean()
    loss.backward()
    optimizer.step()
    assert torch.isfinite(loss), "the rehearsal goes on with numbers"
dist.destroy_process_group()
"""
LAYERS = tuple(f"layers.{n}.{name}" for n in range(2) for name in ("norm.bias", "norm.weight", "up.bias", "up.weight"))
BUILT = '\nwith torch.device("meta"):\n    model = Net()\n'


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What comes between the model and its training, and what of it is used without having been initialised."""

    name: str
    body: str
    model: str = "Net()"
    found: tuple[str, ...] = ()
    ranks: tuple[int, ...] = (0, 1)

    def text(self) -> str:
        """The script."""
        built = BUILT.replace("Net()", self.model)
        return HEAD.replace(BUILT, built) + dedent(self.body) + TAIL

    def write(self, folder: Path) -> None:
        """Write the script to ``train.py`` of a directory."""
        (folder / "train.py").write_text(self.text(), encoding="utf-8")
