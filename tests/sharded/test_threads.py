"""Jobs of which two threads communicate: by one group their order is chance, by two it is none of our business."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest

from tests.check_command import check

SCRIPT = """
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 4)))
torch.manual_seed(dist.get_rank())
optimizer = torch.optim.SGD(model.parameters(), 0.01)
own = dist.new_group()
pool = ThreadPoolExecutor(1)
jobs = queue.Queue()
done = queue.Queue()


def average(group=None):
    copies = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(20):
        for copy in copies:
            dist.all_reduce(copy, group=group)


def serve(group):
    while jobs.get() is not None:
        average(group)
        done.put(None)


def late():
    time.sleep(0.5)
    average()


def save(**options):
    return dcp.async_save({{"model": model.state_dict()}}, checkpoint_id="kept", **options)


{before}
for step in range(6):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
{inside}
{after}
dist.destroy_process_group()
"""
BY_CHANCE = {
    "a checkpoint in the background": ("future = None", "if future is None:\n    future = save()", "future.result()"),
    "a thread for each average": (
        "",
        "thread = threading.Thread(target=average)\nthread.start()\nmodel(torch.randn(8, 64)).sum().backward()",
        "thread.join()",
    ),
    "a pool": ("", "future = pool.submit(average)\nmodel(torch.randn(8, 64)).sum().backward()", "future.result()"),
    "an average that starts late": (
        "",
        "if step == 2:\n    thread = threading.Thread(target=late)\n    thread.start()",
        "thread.join()",
    ),
    "a pool that starts late": ("", "if step < 2:\n    future = pool.submit(late)", "future.result()"),
    "a server": (
        "thread = threading.Thread(target=serve, args=(None,))\nthread.start()",
        "jobs.put(step)",
        "jobs.put(None)\nthread.join()",
    ),
}
IN_ORDER = {
    "a checkpoint by a group of its own": (
        "future = None",
        "if future is None:\n    future = save(process_group=own)",
        "future.result()",
    ),
    "a checkpoint that is awaited": ("", "save().result()", ""),
    "an average that is awaited": ("", "pool.submit(average).result()", ""),
    "a server that is awaited": (
        "thread = threading.Thread(target=serve, args=(None,))\nthread.start()",
        "jobs.put(step)\ndone.get()",
        "jobs.put(None)\nthread.join()",
    ),
    "an average at the end, by a thread of the beginning": (
        "ended = threading.Event()\nthread = threading.Thread(target=lambda: ended.wait() and average())\n"
        "thread.start()",
        "",
        "ended.set()\nthread.join()",
    ),
    "a pool that first did something else": (
        "pool.submit(print, 'ready').result()",
        "pool.submit(average).result()",
        "",
    ),
    "a server of another group": (
        "thread = threading.Thread(target=serve, args=(own,))\nthread.start()",
        "jobs.put(step)",
        "jobs.put(None)\nthread.join()",
    ),
}


def examined(parts: tuple[str, str, str], folder: Path) -> tuple[str, list[dict[str, Any]]]:
    before, inside, after = (dedent(part) for part in parts)
    text = SCRIPT.format(before=before, inside=indent(inside, "    "), after=after)
    (folder / "train.py").write_text(text, encoding="utf-8")
    # What crosses may hang or go on: that is chance, too.
    return text, check("--no-equivalence", "train.py", cwd=folder)[1]["findings"]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if "checkpoint" in n else pytest.mark.long) for n in BY_CHANCE]
)
def test_two_threads_of_one_group_are_named(name: str, tmp_path: Path) -> None:
    text, findings = examined(BY_CHANCE[name], tmp_path)
    (finding,) = [one for one in findings if one["severity"] != "advice"]
    assert finding["name"] == "shared-group", finding["title"]
    lines = text.splitlines()
    called = [lines[place["line"] - 1].strip() for place in finding["locations"]]
    assert ("future = save()" in called or "return dcp.async_save" in called[0]) == ("checkpoint" in name)
    assert "dist.all_reduce" in called[0] or "checkpoint" in name
    assert finding["remedy"].startswith("Give the thread a group of its own")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) for name in IN_ORDER])
def test_threads_that_take_turns_or_have_groups_of_their_own_are_in_order(name: str, tmp_path: Path) -> None:
    assert [one["title"] for one in examined(IN_ORDER[name], tmp_path)[1] if one["severity"] != "advice"] == []
