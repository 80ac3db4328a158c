"""What a script lacks at a restart is written in the names that it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.finding import Location
from ddpdoctor.source.queries.checkpoint_code import own_code
from ddpdoctor.source.script.script import read_script

_HEAD = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
"""
_PLAIN = f"""{_HEAD}
net = DDP(torch.nn.Linear(4, 4))
opt = torch.optim.AdamW(net.parameters())
plan = torch.optim.lr_scheduler.StepLR(opt, 2)
first = 0
if os.path.exists("last.pt"):
    held = torch.load("last.pt", map_location="cpu")  # load
    net.load_state_dict(held["net"])
    first = held["epoch"] + 1
for number in range(first, 9):
    net(torch.randn(2, 4)).sum().backward()
    opt.step()
    torch.save({{"net": net.state_dict(), "optim": opt.state_dict(), "epoch": number}}, "last.pt")  # save
"""
_IN_A_CLASS = f"""{_HEAD}
class Trainer:
    def __init__(self):
        self.model = DDP(torch.nn.Linear(4, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scaler = torch.amp.GradScaler("cuda")
        self.done = 0

    def _save(self, epoch):
        state = dict(model=self.model.state_dict())
        snapshot = {{"MODEL": self.model.module.state_dict(), "EPOCHS_RUN": epoch + 1}}
        torch.save(snapshot, "last.pt")  # save

    def _load(self):
        snapshot = torch.load("last.pt")  # load
        self.model.module.load_state_dict(snapshot["MODEL"])

    def train(self):
        for epoch in range(self.done, 9):
            self.model(torch.randn(2, 4)).sum().backward()
            self.optimizer.step()
            self._save(epoch)

trainer = Trainer()
if os.path.exists("last.pt"):
    trainer._load()
trainer.train()
"""
_GIVEN = f"""{_HEAD}
def load(path, model, optimizer):
    state = torch.load(path)  # load
    model.load_state_dict(state["model"])

def main():
    model = DDP(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    lr = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    if os.path.exists("last.pt"):
        load("last.pt", model, optimizer)
    for epoch in range(9):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        state = {{"model": model.state_dict(), "opt": optimizer.state_dict(), "lr": lr.state_dict()}}
        torch.save(state, "last.pt")  # save

main()
"""


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (
            _PLAIN,
            {
                "weights": ("", 'net.load_state_dict(held["net"])'),
                "optimizer": ("", 'opt.load_state_dict(held["optim"])'),
                "learning-rate": ('"scheduler": plan.state_dict()', 'plan.load_state_dict(held["scheduler"])'),
                "data": ("", 'range(held["epoch"] + 1, …)'),
            },
        ),
        (
            _IN_A_CLASS,
            {
                "weights": ("", 'self.model.module.load_state_dict(snapshot["MODEL"])'),
                "optimizer": (
                    '"optimizer": self.optimizer.state_dict()',
                    'self.optimizer.load_state_dict(snapshot["optimizer"])',
                ),
                "scale": ('"scaler": self.scaler.state_dict()', 'self.scaler.load_state_dict(snapshot["scaler"])'),
                "data": ("", 'range(snapshot["EPOCHS_RUN"], …)'),
            },
        ),
        # The scheduler is no parameter of the function that loads: its name is not known there.
        (
            _GIVEN,
            {
                "weights": ("", 'model.load_state_dict(state["model"])'),
                "optimizer": ("", 'optimizer.load_state_dict(state["opt"])'),
            },
        ),
        # What is loaded goes elsewhere before anything of it is used.
        (_PLAIN.replace("held = torch", "held = dict(torch").replace('"cpu")', '"cpu"))'), {}),
        # Of two optimizers it is not known which one has lost its state.
        (
            _PLAIN.replace("first = 0", "first, opt2 = 0, torch.optim.SGD(net.parameters(), lr=1, momentum=1)"),
            {
                "weights": ("", 'net.load_state_dict(held["net"])'),
                "learning-rate": ('"scheduler": plan.state_dict()', 'plan.load_state_dict(held["scheduler"])'),
                "data": ("", 'range(held["epoch"] + 1, …)'),
            },
        ),
        # The file holds what another function has put together.
        (
            _PLAIN.replace("torch.save({", "kept = make({").replace(
                'number}, "last.pt")', 'number}); torch.save(kept, "last.pt")'
            ),
            {},
        ),
    ],
)
def test_code_is_in_the_names_of_the_script(text: str, code: dict[str, tuple[str, str]], tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(text, encoding="utf-8")
    lines = text.splitlines()
    save, load = (
        Location(file=str(path), line=1 + next(n for n, line in enumerate(lines) if line.endswith(mark)))
        for mark in ("# save", "# load")
    )
    assert own_code(read_script(path), save, load) == code
