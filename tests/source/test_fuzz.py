"""Programs that nobody wrote: the reader and every check of the source stay calm and inside their bounds."""

from __future__ import annotations

import ast
import random
import time
from copy import deepcopy
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddpdoctor.catalogue.registry import read_catalogue
from ddpdoctor.catalogue.run_checks import run_checks
from ddpdoctor.errors import UsageError
from ddpdoctor.source.script.script import read_script
from tests.machine_speed import is_within

ROOT = Path(__file__).parents[2]
CORRECT = Path(__file__).parent / "correct"
REAL = sorted(path for path in (*(ROOT / "examples").glob("*.py"), *CORRECT.rglob("*.py")) if path.stat().st_size)
LONGEST_S = 6.0
"""CPU seconds for one script with all checks."""
HEAD = """\
import os, sys, random, time
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
"""

NAMES = st.sampled_from(["x", "y", "rank", "self", "model", "loader", "loss", "f", "g", "Net"])
ATTRIBUTES = st.sampled_from(["rank", "module", "backward", "item", "no_sync", "set_epoch", "x", "local_rank", "cuda"])
LEAVES = st.one_of(
    NAMES,
    st.integers(-2, 5).map(str),
    st.sampled_from(
        [
            "None",
            "True",
            "()",
            "{}",
            "[]",
            "'RANK'",
            "''",
            "f'{x}.pt'",
            "...",
            "1.5",
            "b'x'",
            "2 ** 70",
            "-1",
            "not x",
            "dist.get_rank()",
            "dist.get_world_size()",
            "int(os.environ['LOCAL_RANK'])",
            "torch.ones(1)",
            "DDP(Net())",
            "DataLoader(x, shuffle=True)",
            "DistributedSampler(x)",
            "nn.Linear(2, 2)",
            "time.time()",
            "random.random()",
            "os.path.exists(x)",
            "super()",
            "__name__",
            "lambda *a, **k: (yield)",
            "mp.spawn(f, nprocs=2)",
        ]
    ),
)
EXPRESSIONS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "%", "//", "==", "<", "in", "and", "or", "is not", "@"]), inner).map(
            lambda parts: f"({parts[0]} {parts[1]} {parts[2]})"
        ),
        st.tuples(inner, ATTRIBUTES).map(lambda parts: f"({parts[0]}).{parts[1]}"),
        st.tuples(inner, inner).map(lambda parts: f"({parts[0]})({parts[1]})"),
        st.tuples(inner, inner).map(lambda parts: f"({parts[0]})[{parts[1]}]"),
        st.tuples(inner, inner, inner).map(lambda parts: f"({parts[0]} if {parts[1]} else {parts[2]})"),
        st.tuples(inner, inner).map(lambda parts: f"[{parts[0]} for x in {parts[1]} if x]"),
        st.tuples(inner, inner).map(lambda parts: f"{{{parts[0]}: {parts[1]}, **x}}"),
        inner.map(lambda part: f"f(*{part}, **{part}, rank={part})"),
        inner.map(lambda part: f"(x := {part})"),
    ),
    max_leaves=6,
)
TARGETS = st.sampled_from(["x", "y.rank", "x[0]", "x, y", "self.model", "*x, y", "os.environ['RANK']"])
SIMPLE = st.one_of(
    EXPRESSIONS,
    st.tuples(TARGETS, EXPRESSIONS).map(lambda parts: f"{parts[0]} = {parts[1]}"),
    st.tuples(NAMES, EXPRESSIONS).map(lambda parts: f"{parts[0]} += {parts[1]}"),
    st.sampled_from(
        [
            "dist.barrier()",
            "dist.all_reduce(x)",
            "dist.init_process_group('nccl')",
            "loss.backward()",
            "return",
            "raise SystemExit",
            "raise",
            "sys.exit(1)",
            "pass",
            "del x",
            "global rank",
            "import torch.distributed as y",
            "torch.save(model.state_dict(), 'a.pt')",
            "model = DDP(model)",
            "x = yield",
            "return f(x)",
            "from os import *",
            "break",
            "continue",
            "assert x",
            "torch.cuda.set_device(rank)",
            "nonlocal x",
            "dist.new_group([0])",
        ]
    ),
)
HEADERS = st.one_of(
    st.sampled_from(
        [
            "with model.no_sync():",
            "with torch.no_grad(), x as y:",
            "while True:",
            "for x, *y in loader:",
            "class Net(nn.Module):",
            "def f(x, rank=0, *a, **k):",
            "def forward(self, x):",
            "async def g():",
            "@f\ndef g(self):",
            "class Net(Net, y):",
            "def f(rank):",
            "for epoch in range(3):",
            "if dist.get_rank() == 0:",
            "if __name__ == '__main__':",
            "@property\ndef rank(self):",
            "@dist.rank_zero_only\ndef f(x):",
        ]
    ),
    EXPRESSIONS.map(lambda part: f"if {part}:"),
    EXPRESSIONS.map(lambda part: f"while {part}:"),
    EXPRESSIONS.map(lambda part: f"for x in {part}:"),
)


def indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    body = st.lists(inner, min_size=1, max_size=4).map("\n".join)
    return st.one_of(
        body,
        st.tuples(HEADERS, body).map(lambda parts: f"{parts[0]}\n{indented(parts[1])}"),
        st.tuples(HEADERS, body, body).map(
            lambda parts: f"try:\n{indented(parts[1])}\nexcept OSError as x:\n{indented(parts[2])}\nfinally:\n    x"
        ),
        st.tuples(EXPRESSIONS, body, body).map(
            lambda parts: f"if {parts[0]}:\n{indented(parts[1])}\nelse:\n{indented(parts[2])}"
        ),
        st.tuples(EXPRESSIONS, body).map(
            lambda parts: f"match {parts[0]}:\n    case [1, *x] | Net(x=x):\n{indented(indented(parts[1]))}"
        ),
    )


PROGRAMS = st.lists(st.recursive(SIMPLE, compound, max_leaves=8), min_size=1, max_size=5).map("\n".join)


def examine(path: Path) -> None:
    """Read a script and run all checks of the source on it."""
    started_s = time.process_time()
    try:
        script = read_script(path)
    except UsageError:
        return
    entries = [entry for entry in read_catalogue().entries if entry.in_source]
    crashed = [(result.code, result.gap) for result in run_checks(entries, script, None, static=True) if result.crashed]
    assert not crashed, path.read_text(encoding="utf-8", errors="replace")
    assert is_within(time.process_time() - started_s, LONGEST_S)


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(program=PROGRAMS)
def test_generated_programs(tmp_path: Path, program: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(HEAD + program, encoding="utf-8")
    examine(path)


@pytest.mark.parametrize("seed", range(24))
def test_real_scripts_with_lines_moved_and_dropped(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    lines = draw.choice(REAL).read_text(encoding="utf-8").splitlines()
    for _ in range(12):
        place = draw.randrange(len(lines))
        kind = draw.randrange(4)
        if kind == 0:
            del lines[place]
        elif kind == 1:
            lines.insert(place, draw.choice(lines))
        elif kind == 2:
            lines[place] = lines[place].replace(draw.choice(["rank", "model", "self", "0", "dist"]), draw.choice("xyz"))
        else:
            lines[place] = "    " + lines[place]
    path = tmp_path / "train.py"
    path.write_text("\n".join(lines), encoding="utf-8")
    examine(path)


@pytest.mark.parametrize("seed", range(24))
def test_real_scripts_with_statements_shuffled(tmp_path: Path, seed: int) -> None:
    """Unlike lines, statements still parse when they change places."""
    draw = random.Random(seed)
    tree = ast.parse(draw.choice(REAL).read_text(encoding="utf-8"))
    found = (getattr(node, "body", None) for node in ast.walk(tree))
    bodies = [body for body in found if isinstance(body, list)]
    for _ in range(6):
        one, other = draw.choice(bodies), draw.choice(bodies)
        one.insert(draw.randrange(len(one) + 1), deepcopy(draw.choice(other)))
        draw.shuffle(draw.choice(bodies))
    path = tmp_path / "train.py"
    path.write_text(ast.unparse(tree), encoding="utf-8")
    examine(path)


@pytest.mark.parametrize("seed", range(24))
def test_real_scripts_with_bytes_changed(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    raw = bytearray(draw.choice(REAL).read_bytes())
    for _ in range(draw.randrange(1, 6)):
        raw[draw.randrange(len(raw))] = draw.choice(b"()[]{}:'\"#\\\n\t .=,\x00\xff0")
    path = tmp_path / "train.py"
    path.write_bytes(bytes(raw))
    examine(path)
