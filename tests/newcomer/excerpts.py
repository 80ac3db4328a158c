"""Compares what the pages of ``docs`` show beside the tutorial with what the command prints, numbers masked.

A row is data: the page, which of its ``text`` blocks, the script, and the command. Of a block that several rows share,
each piece between empty lines has to be printed by one of them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.equivalence import cases
from tests.newcomer.printed import ROOT
from tests.newcomer.story import Told, missing
from tests.resume.cases import FAULTS
from tests.resume.signals import SIGNALLED
from tests.sharded import jobs

SQUARE_ROOT = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Root(nn.Module):
    def forward(self, x):
        return torch.sqrt(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.root, self.last = nn.Linear(8, 8), Root(), nn.Linear(8, 1)

    def forward(self, x):
        return self.last(self.root(torch.relu(self.first(x)) + 1 - 2 * x[:, :1]))


dist.init_process_group("gloo")
torch.manual_seed(0)
rows = torch.zeros(96, 8)
rows[40, 0] = 1
data = TensorDataset(rows, torch.randn(96, 1))
sampler = DistributedSampler(data, shuffle=False)
model = DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
for x, y in DataLoader(data, batch_size=4, sampler=sampler):
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""
_BY_NAME = {case.name: case for case in cases.FAULTS}
_EITHER = 'main(*("sharded", "sums") if "--fsdp" in sys.argv else ("ddp", "none"))'
_OTHER = "torchrun --nproc-per-node 2 train.py"
_RANK_0_ALONE = next(job for job in jobs.WRONG if job.name == "rank 0 evaluates alone without gradients")


class Row(NamedTuple):
    """What a page shows, and how it is printed."""

    page: str
    block: int
    script: str
    command: str
    quick: bool = False
    """Part of the suite."""


def _resumed(script: str, page_block: int) -> Row:
    script = script.replace("  # load", "")
    return Row("resume", page_block, script, "ddpdoctor check --resume --no-equivalence train.py")


def _equivalent(script: str) -> Row:
    return Row("equivalence", 0, script, "ddpdoctor check --equivalence train.py")


ROWS = (
    Row("nan", 0, SQUARE_ROOT, "ddpdoctor profile --no-tui --nproc 3 train.py", quick=True),
    Row("fsdp", 0, jobs.EXAMPLE.read_text(), "ddpdoctor check --no-equivalence train.py", quick=True),
    Row("fsdp", 1, _RANK_0_ALONE.text(), "ddpdoctor check --no-equivalence train.py"),
    Row("fsdp", 2, jobs.EXAMPLE.read_text(), "ddpdoctor profile --no-tui --nproc 4 train.py -- --replicas 2"),
    _equivalent((cases.SCRIPTS / "vision.py").read_text()),
    _equivalent(_BY_NAME["vision: the loss times the world size"].text()),
    _equivalent(_BY_NAME["language: the mean over the tokens of each rank"].text()),
    Row(
        "equivalence",
        1,
        (cases.SCRIPTS / "strategies.py").read_text().replace("main(*sys.argv[1:3])", _EITHER),
        f'ddpdoctor check --against "{_OTHER} --fsdp" -- {_OTHER}',
    ),
    _resumed(FAULTS["the optimizer is not loaded"].script, 0),
    _resumed(SIGNALLED["signal: the rest of the epoch is left out"].script, 1),
)


def shown(page: str) -> list[str]:
    """Return the ``text`` blocks of a page."""
    return re.findall(r"^```text\n(.*?)^```$", (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"), re.M | re.S)


def compared(rows: Iterable[Row], folder: Path, environment: Mapping[str, str]) -> Iterator[tuple[str, Told]]:
    """Run each command in a folder of its own; yield for each block the page and what of it was not printed."""
    printed: dict[tuple[str, int], str] = {}
    for number, row in enumerate(rows):
        project = folder / str(number)
        project.mkdir()
        (project / "train.py").write_text(row.script)
        done = subprocess.run(
            ["bash", "-c", row.command], cwd=project, env=dict(environment), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        key = (row.page, row.block)
        printed[key] = f"{printed.get(key, '')}\n{done.stdout}{done.stderr}"
    for (page, block), text in printed.items():
        told = shown(page)[block]
        pieces = re.split(r"\n\n|…\n", told)
        yield page, Told(told, tuple(piece for part in pieces for piece in missing(part, text)))


def tell(folder: Path, environment: Mapping[str, str]) -> int:
    """Print what is shown and not printed; return how many blocks that is."""
    wrong = 0
    folder.mkdir()
    for page, told in compared(ROWS, folder, environment):
        sys.stdout.write(f"{'BAD' if told.missing else 'ok '}  {page}.md shows: {told.block.splitlines()[0]}\n")
        sys.stdout.writelines(f"     not printed: {piece}\n" for piece in told.missing)
        sys.stdout.flush()
        wrong += bool(told.missing)
    return wrong
