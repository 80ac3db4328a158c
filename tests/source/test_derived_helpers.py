"""Helpers of a library that a project derives from: what the project leaves alone is the library's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.source.marked import check_marks

ACCELERATE = """
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
"""
FABRIC = """
import torch
from lightning.fabric import Fabric
"""
TRAINER = """
import lightning
"""
NET = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x + torch.randn_like(x)).mean()

loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 4)), 8, shuffle=True)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""
FOUND = {
    "nothing but a method of its own": ACCELERATE
    + """
class Saving(Accelerator):
    def get_state_dict(self, model, unwrap=True):
        return super().get_state_dict(model, unwrap)

accelerator = Saving()
if accelerator.is_main_process:
    accelerator.wait_for_everyone()  # DDP301
""",
    "what its own preparation hands on": ACCELERATE
    + NET
    + """
class Prepared(Accelerator):
    def __init__(self, where):
        super().__init__(log_with="wandb")
        self.where = where

    def prepare(self, *parts):
        return super().prepare(*parts)

set_seed(7)  # DDP104
accelerator = Prepared("runs")
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (x,) in loader:
    loss = model(x)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
""",
    "a class of a class": ACCELERATE
    + """
class First(Accelerator):
    pass

class Second(First):
    def leave(self):
        if self.is_main_process:
            self.wait_for_everyone()  # DDP301

Second().leave()
""",
    "an attribute that is one": ACCELERATE
    + """
class Own(Accelerator):
    def __init__(self):
        super().__init__()

class Loop:
    def __init__(self):
        self.accelerator = Own()

    def run(self):
        if self.accelerator.process_index == 0:
            self.accelerator.gather(torch.ones(1))  # DDP301

Loop().run()
""",
    "a Fabric": FABRIC
    + """
class Quiet(Fabric):
    def say(self, text):
        if self.is_global_zero:
            print(text)

fabric = Quiet(accelerator="cuda", devices=4)
fabric.launch()
if fabric.global_rank == 0:
    fabric.barrier()  # DDP301
""",
    "a Trainer": TRAINER
    + """
class Patient(lightning.Trainer):
    def wait(self):
        if self.is_global_zero:
            self.strategy.barrier()  # DDP301

trainer = Patient(devices=4)
trainer.wait()
""",
}
SILENT = {
    "a method of its own name is its own": ACCELERATE
    + """
class Own(Accelerator):
    def wait_for_everyone(self):
        return None

accelerator = Own()
if accelerator.is_main_process:
    accelerator.wait_for_everyone()
""",
    "a property of its own name is its own": ACCELERATE
    + """
class Own(Accelerator):
    @property
    def is_main_process(self):
        return True

accelerator = Own()
if accelerator.is_main_process:
    accelerator.wait_for_everyone()
""",
    "all ranks come": ACCELERATE
    + """
class Own(Accelerator):
    def leave(self):
        self.wait_for_everyone()
        if self.is_main_process:
            print("left")

Own().leave()
""",
    "a Trainer of one process": TRAINER
    + """
class Lone(lightning.Trainer):
    def wait(self):
        if self.is_global_zero:
            self.strategy.barrier()

Lone(devices=1).wait()
""",
}


@pytest.mark.parametrize("name", FOUND)
def test_what_a_derived_helper_does_is_what_its_library_does(name: str, tmp_path: Path) -> None:
    check_marks(tmp_path, FOUND[name], "DDP104", "DDP301", head="")


@pytest.mark.parametrize("name", SILENT)
def test_what_the_project_wrote_anew_is_its_own(name: str, tmp_path: Path) -> None:
    check_marks(tmp_path, SILENT[name], "DDP104", "DDP301", head="")
