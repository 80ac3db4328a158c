"""A watched job without a loader whose rank 1 leaves a backward out, and what may look like it and is correct."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from ddpdoctor.checks.collectives import silent_desync
from ddpdoctor.finding import Finding
from tests.monitor.watched import finished

JOB = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DDP(nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def step_at(x):
    return model(x).square().mean()

def train(step):
    x = torch.randn(4, 8)
    BEFORE
    loss = step_at(x)  # forward
    BETWEEN
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

for step in range(60):
    train(step)
AFTER
dist.destroy_process_group()
"""
HEALTHY = """
class Fails(nn.Module):
    # Raises at its first use on rank 1, as one that runs out of memory does.
    def __init__(self):
        super().__init__()
        self.inner, self.calls = nn.Linear(8, 3), 0
    def forward(self, x):
        self.calls += 1
        if rank == 1 and self.calls % 9 == 0: raise RuntimeError("out of memory")
        return self.inner(x)

def score(module):
    return float(module(torch.randn(4, 8)).sum())  # records gradients that nobody wants

def together(optimizer, module):
    for step in range(40):
        loss = module(torch.randn(4, 8)).sum()
        if step in (5, 6): continue
        optimizer.zero_grad(); loss.backward(); optimizer.step()

def rank_zero_scores(optimizer, module):
    for step in range(40):
        loss = module(torch.randn(4, 8)).sum()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        if rank == 0 and step % 7 == 3: score(module), score(module)

def accumulate_unevenly(optimizer, module):
    for step in range(40):
        with module.no_sync():
            for _ in range(1 + rank * (step % 3)): module(torch.randn(4, 8)).sum().backward()
        module(torch.randn(4, 8)).sum().backward()
        optimizer.step(); optimizer.zero_grad()

def several_views(optimizer, module):
    for step in range(40):
        loss = sum(module(torch.randn(4, 8)).sum() for _ in range(3))
        optimizer.zero_grad(); loss.backward(); optimizer.step()

def tried_again(optimizer, module):
    for step in range(40):
        while True:
            try:
                loss = module(torch.randn(4, 8)).sum()
                break
            except RuntimeError:
                continue
        optimizer.zero_grad(); loss.backward(); optimizer.step()

def joined(optimizer, module):
    with module.join():
        for step in range(40 + 5 * rank):
            loss = module(torch.randn(4, 8)).sum()
            optimizer.zero_grad(); loss.backward(); optimizer.step()

def in_turns(optimizer, module):
    for step in range(41):
        loss = module(torch.randn(4, 8)).sum()
        if step == 5 + 3 * rank: continue
        optimizer.zero_grad(); loss.backward(); optimizer.step()

plain = together, rank_zero_scores, accumulate_unevenly, several_views, joined, in_turns
for loop, inner in [*((loop, nn.Linear(8, 3)) for loop in plain), (tried_again, Fails())]:
    module = DDP(inner, broadcast_buffers=False)
    loop(torch.optim.SGD(module.parameters(), lr=0.01), module)
last = DDP(nn.Linear(8, 3))
for _ in range(30):
    last(torch.randn(4, 8)).sum().backward()
dist.destroy_process_group()
"""


def _verdict(folder: Path, **lines: str) -> dict[str, Any]:
    """The finding that is the verdict on the job with lines at its places."""
    script = JOB
    for place in ("before", "between", "after"):
        script = script.replace(place.upper(), lines.get(place, "pass"))
    (folder / "train.py").write_text(script)
    command = (sys.executable, "-m", "ddpdoctor", "profile", "--no-tui", "--output-format", "json")
    done = subprocess.run(
        (*command, "--run-dir", str(folder / "run"), "--nproc", "2", str(folder / "train.py")),
        capture_output=True,
        check=False,
    )
    report = json.loads(done.stdout)
    found: dict[str, Any] = next(one for one in report["findings"] if one["code"] == report["verdict"]["code"])
    return {**found, "text": (folder / "train.py").read_text().splitlines()}


def test_a_mismatch_at_the_end_is_laid_to_the_bad_loss_that_one_rank_passed_over(tmp_path: Path) -> None:
    found = _verdict(
        tmp_path,
        before="if rank == 1 and step == 5: x[0] = float('nan')",
        between="if not torch.isfinite(loss): return",
        after="dist.all_reduce(torch.ones(2))",
    )
    # Once, on a loaded machine, it was the mismatch itself: what the ranks were seen in tells why.
    assert (found["code"], found["severity"], found["ranks"]) == ("DDP312", "error", [1]), found
    assert found["title"].startswith("in step 6 rank 1 ran the training forward at train.py:15 once more than rank 0")
    places = [found["text"][location["line"] - 1].strip() for location in found["locations"]]
    assert places[0] == "return model(x).square().mean()"
    assert {"loss.backward()", "dist.all_reduce(torch.ones(2))"} <= set(places)


def test_of_correct_loops_nothing_is_said(tmp_path: Path) -> None:
    record = finished(tmp_path, HEALTHY)
    told = {(row.wrap, row.rank) for row in record.unfollowed_forwards}
    assert {(0, 0), (0, 1), (3, 0), (3, 1), (5, 0), (5, 1)} == told, "all alike, several views, in turns"
    assert [found.title for found in silent_desync.in_run(record) if isinstance(found, Finding)] == []
