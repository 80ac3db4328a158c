"""What a user reads of their own exceptions is the same whether the job is watched or not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddpdoctor.launch.environment import observed
from ddpdoctor.probe.environment import free_port

SCRIPT = """
import traceback
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

class Broken(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        raise KeyError("sample")

class Unordered:
    def __len__(self):
        return 4
    def __iter__(self):
        raise RuntimeError("no order")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
    def forward(self, inputs):
        if inputs is None:
            raise ValueError("no input")
        return self.layer(inputs)

def say(name, act):
    print("==", name)
    try:
        act()
    except Exception:
        print(traceback.format_exc())
    else:
        print("nothing was raised")

before = {
    "fetch": lambda: next(iter(DataLoader(Broken()))),
    "order": lambda: next(iter(DataLoader(Broken(), sampler=Unordered()))),
    "save": lambda: torch.save({}, "/nowhere/weights.pt"),
    "backward": lambda: torch.zeros(1).backward(),
}
for name, act in before.items():
    say(name, act)
dist.init_process_group("gloo")
model = DDP(Net())
then = before | {
    "group": lambda: dist.new_group([5]),
    "wrap": lambda: DDP(nn.ReLU()),
    "loader": lambda: DataLoader(Broken(), batch_size=-1),
    "forward": lambda: model(None),
    "collective": lambda: dist.all_reduce("text"),
    "collective in a collective": lambda: dist.broadcast_object_list([lambda: 1], src=0),
}
for name, act in then.items():
    say(name, act)
model(None)
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="before 3.11 Python puts the frame back that is taken out")
def test_a_traceback_shows_no_frame_of_ours_and_none_of_the_users_is_lost(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    alone = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    said = []
    for watched in ({}, observed(tmp_path / "run", alone)):
        environment = {**alone, "MASTER_PORT": str(free_port()), **watched}
        done = subprocess.run((sys.executable, str(script)), env=environment, capture_output=True, text=True)
        said.append((done.returncode, done.stdout, done.stderr))
    assert said[0] == said[1]
    assert (said[0][0], said[0][1].count("==")) == (1, 14)
    assert said[0][2].rstrip().endswith("ValueError: no input")
    assert list((tmp_path / "run").glob("steps-*.ring"))
