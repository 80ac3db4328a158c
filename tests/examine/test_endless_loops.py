"""A rank that goes around one loop of its data code for ever while its peers wait, and one that is only slow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest

from tests.check_command import check, with_our_tree

JOB = """
import itertools
import random
import threading
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

SHARDS = ["a-000"]


def read(shard):
    for _ in range(8):
        yield torch.randn(4)


DATA


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = LOADER
    for step, inputs in enumerate(loader):
        optimizer.zero_grad()
        model(inputs).mean().backward()
        optimizer.step()
        if step == 3:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""
STREAM = """
class Stream(IterableDataset):
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        self.mine = SHARDS[rank::world]
        self.buffer = []

    def __iter__(self):
BODY
"""
LOADED = "DataLoader(Stream(rank, world), batch_size=2)"


def _stream(body: str, loader: str = LOADED) -> str:
    data = STREAM.replace("BODY", indent(dedent(body).strip(), "        "))
    return JOB.replace("DATA", data).replace("LOADER", loader)


_SHARE = """
while True:
    for shard in self.mine:
        yield from read(shard)
"""
_OWN_SHARE = """
own = [shard for number, shard in enumerate(SHARDS) if number % self.world == self.rank]
rng = random.Random(self.rank)
while True:
    order = sorted(own, key=lambda shard: rng.random())
    for shard in order:  # loop
        yield from read(shard)
"""
_ANEW = """
files = iter(self.mine)
while True:
    try:
        shard = next(files)  # loop
    except StopIteration:
        files = iter(self.mine)
        continue
    yield from read(shard)
"""
_BY_EPOCH = """
for epoch in itertools.count():
    order = list(self.mine)
    random.Random(epoch).shuffle(order)
    for shard in order:
        yield from read(shard)
"""
_BY_HAND = """
class Stream:
    def __init__(self, rank, world):
        self.mine = SHARDS[rank::world]
        self.buffer = []

    def __iter__(self):
        return self

    def fill(self):
        for shard in self.mine:
            self.buffer.extend(read(shard))

    def __next__(self):
        while True:
            if self.buffer:
                return self.buffer.pop().reshape(1, 4)
            self.fill()  # loop
"""
_REJECTING = """
class Drawn(Dataset):
    def __init__(self, rank):
        self.kinds = [0] * 12
        self.wanted = rank

    def __len__(self):
        return 16

    def __getitem__(self, index):
        while True:
            number = random.randrange(len(self.kinds))
            if self.kinds[number] == self.wanted:
                return torch.randn(4)
"""
DRAWN = "DataLoader(dataset := Drawn(rank), batch_size=2, sampler=DistributedSampler(dataset))"
LOOPS = {
    "an empty share": (_stream(_SHARE), "`self.mine` is empty"),
    "an empty share in a variable": (_stream(_OWN_SHARE), "`order` and `own` are empty"),
    "an empty share begun anew": (_stream(_ANEW), "`self.mine` is empty"),
    "an empty share, epoch after epoch": (_stream(_BY_EPOCH), "`order` and `self.mine` are empty"),
    "an empty share in a worker": (_stream(_SHARE, LOADED[:-1] + ", num_workers=1)"), "`self.mine` is empty"),
    "an iterator by hand": (
        JOB.replace("DATA", _BY_HAND).replace("LOADER", "Stream(rank, world)"),
        "`self.buffer` and `self.mine` are empty",
    ),
    "no draw is accepted": (JOB.replace("DATA", _REJECTING).replace("LOADER", DRAWN), ""),
}
_READ = """
        while True:
            yield from read(SHARDS[0])
"""
SLOW = {
    "a cache is built": """
cache = {}
number = 0
began = time.monotonic()
while self.rank == 1 and len(cache) < 180:
    cache[number] = sum(range(3_000_000))
    number += 1
""",
    "a rare find": """
seed = 1
while self.rank == 1 and seed != 6_000_000:
    seed = seed + 1
""",
    "long decoding": """
while True:
    done = sum(range(900_000_000)) if self.rank == 1 else 1
    if done:
        break
""",
    "another thread fills": """
filler = threading.Timer(22, lambda: self.buffer.append(1))
filler.start()
while self.rank == 1 and not self.buffer:
    pass
""",
    "a clock is awaited": """
began = time.monotonic()
while self.rank == 1:
    if time.monotonic() - began > 22:
        break
""",
    "a file is read": """
with open("/dev/zero", "rb") as zeros:
    total = 0
    while self.rank == 1:
        chunk = zeros.read(1 << 20)
        total += len(chunk)
        if total > 60 << 30:
            break
""",
}


def _examined(directory: Path, text: str, limit_s: int) -> tuple[dict[str, Any], dict[str, Any]]:
    (directory / "train.py").write_text(text, encoding="utf-8")
    _, report = check("train.py", "--time-limit", str(limit_s), cwd=directory)
    hangs = [finding for finding in report["findings"] if finding["code"] == "DDP305"]
    return report["rehearsal"], hangs[0] if hangs else {}


def test_an_empty_share_is_told_with_its_line(tmp_path: Path) -> None:
    _is_told("an empty share", tmp_path)


@pytest.mark.parametrize("name", [name for name in LOOPS if name != "an empty share"])
def test_every_loop_without_an_end_is_told_with_what_is_empty(name: str, tmp_path: Path) -> None:
    _is_told(name, tmp_path)


def _is_told(name: str, directory: Path) -> None:
    text, empty = LOOPS[name]
    rehearsal, finding = _examined(directory, text, 90)
    assert finding, rehearsal
    assert (finding["severity"], finding["ranks"]) == ("warning", [1])
    assert "endless loop" in finding["title"] and "all_reduce (DDP backward)" in finding["title"]
    told = " ".join(fact["text"] for fact in finding["evidence"])
    assert empty in told, told
    assert ("at least one" in finding["remedy"]) is bool(empty)


@pytest.mark.parametrize("name", SLOW)
def test_a_rank_that_is_only_slow_is_not_accused(name: str, tmp_path: Path) -> None:
    _, finding = _examined(tmp_path, _stream(f"{dedent(SLOW[name])}\n{dedent(_READ)}"), 32)
    assert not finding, finding["title"]


def test_a_long_wait_without_a_proof_is_inconclusive_and_says_for_whom(tmp_path: Path) -> None:
    late = (
        SLOW["another thread fills"].replace("Timer(22", "Timer(300").replace("filler.st", "filler.daemon=1;filler.st")
    )
    rehearsal, finding = _examined(tmp_path, _stream(f"{dedent(late)}\n{dedent(_READ)}"), 60)
    assert not finding, finding["title"]
    assert rehearsal["hint"].startswith("Rank 0 waited ") and "s for rank 1" in rehearsal["hint"], rehearsal


FREED = """
import torch
from ddpdoctor.probe.endless_loops import _content

flag = torch.zeros(4)
kept = _content(flag)
flag[2] = 1
assert _content(flag) != kept
flat = torch.ones(64)
part = flat[32:48]
flat.untyped_storage().resize_(0)  # as FSDP lets go of parameters between two forwards
assert _content(part) == _content(part)
assert _content(flat) == _content(flat)


class Part(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        assert function.__name__ not in ("tolist", "reshape", "detach"), function
        return super().__torch_function__(function, types, arguments, options or {})


part = torch.zeros(4).as_subclass(Part)
assert _content(part) == _content(part)
"""


def test_memory_that_was_let_go_of_is_not_read() -> None:
    subprocess.run([sys.executable, "-c", FREED], check=True, env=with_our_tree(), timeout=120)
