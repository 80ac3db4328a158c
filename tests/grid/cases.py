"""Writes the scripts of the grid: what ranks do, where it stands, how the rank is asked, and how ranks part."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Mapping
from typing import NamedTuple

ACTIONS: Mapping[str, str] = {
    "collective, others none": "dist.all_reduce(x)",
    "collective A, others B": "dist.all_reduce(x)",
    "forward": "model(x)",
    "backward": "model(x).sum().backward()",
    "none": "print(x)",
}
"""What some ranks do and others do not."""
MODELS: Mapping[str, str] = {"forward": "nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))"}
PLACES = ("direct", "helper", "method", "imported module", "nested function")
TESTS: Mapping[str, tuple[str, str]] = {
    "call": ("", "dist.get_rank() == 0"),
    "variable": ("rank = dist.get_rank()", "rank != 0"),
    "environment": ("", 'int(os.environ["RANK"]) > 0'),
    "function": ("def is_main_process():\n    return dist.get_rank() == 0\n", "is_main_process()"),
    "attribute": ("args = argparse.Namespace()\nargs.rank = dist.get_rank()", "args.rank == 0"),
    "property": (
        "class Job:\n    @property\n    def first(self):\n        return dist.get_rank() == 0\n\njob = Job()",
        "job.first",
    ),
    "entry of a dict": ('config = {"rank": dist.get_rank(), "lr": 0.1}', 'config["rank"] == 0'),
    "lambda": ("is_first = lambda: dist.get_rank() == 0", "is_first()"),
    "with a condition more": ("", "limit > 3 and dist.get_rank() == 0"),
}
"""Preparation and expression of every form of the rank test."""
SHAPES: Mapping[str, tuple[str, str]] = {
    "branch": (
        "if TEST:\n    ACT\nelse:\n    OTHER",
        "if TEST:\n    ACT\n    print(1)\nelse:\n    print(2)\n    ACT",
    ),
    "early return": (
        "def step():\n    if TEST:\n        OTHER\n        return\n    ACT\n\nstep()",
        "def step():\n    ACT\n    if TEST:\n        return\n    print(1)\n\nstep()",
    ),
    "break": (
        "for turn in range(100):\n    if TEST:\n        OTHER\n        break\n    ACT",
        "for turn in range(100):\n    if turn == limit:\n        break\n    ACT\n    if TEST:\n        print(turn)",
    ),
    "continue": (
        "for turn in range(100):\n    if TEST:\n        OTHER\n        continue\n    ACT",
        "for turn in range(100):\n    ACT\n    if TEST:\n        continue\n    print(turn)",
    ),
    "exception": (
        "try:\n    if TEST:\n        raise ValueError\n    ACT\nexcept ValueError:\n    OTHER",
        "ACT\ntry:\n    if TEST:\n        raise ValueError\n    print(1)\nexcept ValueError:\n    print(2)",
    ),
    "loop bound": (
        "for turn in range(5 if TEST else 3):\n    ACT\nOTHER",
        "verbose = 5 if TEST else 3\nfor turn in range(5):\n    ACT\nprint(verbose)",
    ),
}
"""Broken and correct form of every way that ranks part."""
HERE = "  # here"
HEAD = """\
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
"""


class Case(NamedTuple):
    """One script of the grid."""

    action: str
    place: str
    test: str
    shape: str
    broken: bool
    files: dict[str, str]
    """Text by file name; the entry is ``train.py``."""

    @property
    def lines(self) -> frozenset[tuple[str, int]]:
        """File and line of the calls that only some ranks make."""
        return frozenset(
            (name, number)
            for name, text in self.files.items()
            for number, line in enumerate(text.splitlines(), start=1)
            if line.endswith(HERE)
        )

    @property
    def name(self) -> str:
        """The case in words."""
        return " / ".join((self.action, self.place, self.test, self.shape, "broken" if self.broken else "correct"))


def grid() -> Iterator[Case]:
    """Every case; what does nothing together is only there in its correct form."""
    for action, place, test, shape in itertools.product(ACTIONS, PLACES, TESTS, SHAPES):
        for broken in (True, False):
            if not (broken and action == "none"):
                yield Case(action, place, test, shape, broken, _files(action, place, test, shape, broken))


def _files(action: str, place: str, test: str, shape: str, broken: bool) -> dict[str, str]:
    prepare, expression = TESTS[test]
    statement = ACTIONS[action] + HERE
    other = "dist.barrier()" + HERE if action == "collective A, others B" else "print(0)"
    body = SHAPES[shape][0 if broken else 1]
    body = body.replace("TEST", expression).replace("OTHER", other)
    definition = f"def act(model, x):\n    {statement}\n"
    parts = [HEAD]
    files: dict[str, str] = {}
    call = "act(model, x)"
    before = ""
    if place == "direct":
        call = statement
    elif place == "helper":
        parts.append(definition)
    elif place == "method":
        parts.append("class Worker:\n" + textwrap.indent(definition.replace("(model", "(self, model"), "    "))
        call = "worker.act(model, x)"
        before = "worker = Worker()\n"
    elif place == "imported module":
        parts.append("from actions import act\n")
        files["actions.py"] = f"{HEAD}\n\n{definition}"
    else:
        before = definition
    model = MODELS.get(action, "nn.Linear(4, 4)")
    main = (
        f'dist.init_process_group("gloo")\nmodel = DDP({model})\nx = torch.ones(2, 4)\nlimit = torch.initial_seed()\n'
        f"{prepare}\n{before}{body.replace('ACT', call)}\ndist.destroy_process_group()\n"
    )
    parts.append(f"def main():\n{textwrap.indent(main, '    ')}\n\nmain()\n")
    files["train.py"] = "\n".join(parts)
    return files
