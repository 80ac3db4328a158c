"""Loops and comprehensions over a few known items, which are walked a turn after the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.examine.one_script import ExamineRequest, examine

HEAD = """import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from data import feed, make


def loader_of(split, shared=True):
    data = make(split)
    return DataLoader(data, 8, sampler=DistributedSampler(data) if shared else None, shuffle=not shared)


class Trainer:
    def __init__(self, model, optimizer, loaders):
        self.model, self.optimizer, self.loaders = model, optimizer, loaders

    def step(self, x, y=0):
        loss = torch.nn.functional.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trainer = Trainer(model, optimizer, None)
train_loader, val_loader = loader_of("train"), loader_of("val")
"""


def codes(directory: Path, body: str) -> set[str]:
    """The codes of what the static check says of a script."""
    path = directory / "train.py"
    path.write_text(f"{HEAD}{body}\ndist.destroy_process_group()\n")
    return {finding.code for finding in examine(ExamineRequest(target=str(path), static=True)).findings}


def branching(loop: str, test: str) -> str:
    """A training step under a test in an outer loop."""
    return f"{loop}\n    for x, y in train_loader:\n        if {test}:\n            trainer.step(x, y)\n"


WRITTEN = {
    "for i, mode in enumerate(['train', 'val']):": "mode == 'train'",
    "for weight in [0.1, 0.2, 0.5]:": "weight > 0.1",
    "for mode in ('a', 'b', 'c', 'd', 'e', 'f'):": "mode != 'c'",
    "for name, weight in [('a', 1.0), ('b', 0.0)]:": "weight > 0",
    "for name, weight in {'a': 1.0, 'b': 0.0}.items():": "weight > 0",
    "for name, weight in zip(['a', 'b'], (1.0, 0.0)):": "weight > 0",
    "for i, weight in enumerate((1.0, 0.0, 0.3, 0.4, 0.5)):": "weight > 0 and i < 3",
}


@pytest.mark.parametrize("loop", WRITTEN)
def test_items_that_are_written_out_are_no_rank_s_own(tmp_path: Path, loop: str) -> None:
    assert "DDP302" not in codes(tmp_path, branching(loop, WRITTEN[loop]))


@pytest.mark.parametrize(
    "loop",
    [
        "for i, x in enumerate(feed()):",
        "for x in [feed(), feed()]:",
        "for x, k in [(feed(1), 1), (feed(2), 2)]:",
        "for name, x in feed().items():",
    ],
)
def test_items_that_were_not_followed_are(tmp_path: Path, loop: str) -> None:
    body = (
        f"{loop}\n    loss = model(x).sum()\n    if x.sum() > 0:\n        loss.backward()\n        optimizer.step()\n"
    )
    assert "DDP302" in codes(tmp_path, body)


@pytest.mark.parametrize(
    ("loop", "loader"),
    [
        ("for i, mode in enumerate(['train', 'val']):", "[train_loader, val_loader][i]"),
        ("for mode, loader in [('train', train_loader), ('val', val_loader)]:", "loader"),
        ("for mode, loader in zip(['train', 'val'], [train_loader, val_loader]):", "loader"),
        ("for mode, loader in {'train': train_loader, 'val': val_loader}.items():", "loader"),
        ("for mode in {'train': 0, 'val': 1}:", "{'train': train_loader, 'val': val_loader}[mode]"),
    ],
)
def test_a_loader_of_each_turn_is_known(tmp_path: Path, loop: str, loader: str) -> None:
    body = f"{loop}\n    total = 0\n    for x, y in {loader}:\n"
    body += "        loss = model(x).sum()\n        total += loss.item()\n"
    body += "        if mode == 'train':\n            loss.backward()\n            optimizer.step()\n"
    shown = "    if dist.get_rank() == 0:\n        print(mode, total)\n"
    assert "DDP606" in codes(tmp_path, body + shown)
    reduced = "    total = torch.tensor(total)\n    dist.all_reduce(total)\n"
    assert "DDP606" not in codes(tmp_path, body + reduced + shown)


LOADERS = [
    "loaders = {split: loader_of(split, SHARED) for split in splits}",
    "loaders = {}\nfor split in splits:\n    loaders[split] = loader_of(split, SHARED)",
    "one, other = [loader_of(split, SHARED) for split in ('train', 'val')]\nloaders = dict(train=one, val=other)",
    "loaders = dict(zip(splits, [loader_of(split, SHARED) for split in splits]))",
    "loaders = dict((split, loader_of(split, SHARED)) for split in splits)",
    "loaders = {}\nfor i, split in enumerate(splits):\n    loaders[split] = loader_of(split, SHARED)",
]


@pytest.mark.parametrize("made", LOADERS)
def test_each_turn_makes_an_object_of_its_own(tmp_path: Path, made: str) -> None:
    made = f"splits = ['train', 'val']\n{made}\ntrainer.loaders = loaders\n"
    rest = "    for x, y in trainer.loaders['train']:\n        trainer.step(x, y)\n"
    whole = codes(tmp_path, f"{made.replace('SHARED', 'False')}for epoch in range(3):\n{rest}")
    assert {"DDP101", "DDP102"} & whole == {"DDP101"}
    shared = made.replace("SHARED", "True")
    assert {"DDP101", "DDP102"} & codes(tmp_path, f"{shared}for epoch in range(3):\n{rest}") == {"DDP102"}
    told = "for epoch in range(3):\n    trainer.loaders['train'].sampler.set_epoch(epoch)\n"
    assert not {"DDP101", "DDP102"} & codes(tmp_path, f"{shared}{told}{rest}")


RESUMED = """
def resumed(model, optimizer):
    try:
        state = torch.load("last.pt")
        return model, optimizer, state["epoch"] + 1
    except Exception:
        return model, optimizer, 0


model, optimizer, start = resumed(model, optimizer)
for epoch in range(start, 3):
    for x, y in train_loader:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
"""


def test_what_a_function_returns_in_several_places_is_taken_apart(tmp_path: Path) -> None:
    assert "DDP102" in codes(tmp_path, RESUMED)
