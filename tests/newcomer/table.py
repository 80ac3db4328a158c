"""How each printed command is done: in a project of its own, what has to be there, and how it has to end."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

TRAIN = """\
import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--resume", default="")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(64, 1))
    data = TensorDataset(torch.randn(512, 64), torch.randn(512, 1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    first = 0
    if options.resume:
        state = torch.load(options.resume)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1
    for epoch in range(first, options.epochs):
        sampler.set_epoch(epoch)
        for rows, wanted in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(rows), wanted).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, "last.pt.new")
            os.replace("last.pt.new", "last.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""
TEST = """\
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def on_rank(rank):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29617")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == 2
    dist.destroy_process_group()


def test_sums():
    mp.spawn(on_rank, nprocs=2)
"""
LOG = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/job/train.py", line 40, in <module>
[rank1]:     main()
[rank1]:   File "/job/train.py", line 31, in main
[rank1]:     raise ValueError("a bad record")
[rank1]: ValueError: a bad record
"""
FILES: Mapping[str, str] = {
    "train.py": TRAIN,
    "src/train.py": TRAIN,
    "tools/train.py": TRAIN,
    "package/__init__.py": "",
    "package/train.py": TRAIN,
    "tests/distributed/test_sums.py": TEST,
    "notify.sh": "cat > notified\n",
    "slurm-123.out": LOG,
    "job.log": LOG,
    "dumps/README": "no dump was written\n",
    "data/README": "made by the script itself\n",
    ".gitignore": "*\n!train.py\n!.gitignore\n",
}
"""The project that the documents speak of."""
STANDS_FOR = (
    (r"(?<= )/data\b|\bDIR\b", "data"),
    (r"\bRUN RUN\b|\bBEFORE AFTER\b", "{first} {newest}"),
    (r"\bRUN\b", "{newest}"),
    (r"--nproc-per-node 8", "--nproc-per-node 2"),
    (r"--ranks 1,2,4", "--ranks 1,2 --no-links"),
    (r"torchrun …|torchrun \.\.\.|torchrun train.py", "torchrun --nproc-per-node 2 train.py"),
    (r"PATH\.\.\.", "job.log"),
)
"""What a reader puts in the place of a word of the documents, and fewer ranks, for a machine of two cores."""
CODES: Mapping[str, frozenset[int]] = {
    "check examples/unused_parameters.py": frozenset({1}),
    "autopsy": frozenset({1}),
    "compare": frozenset({0, 1}),
    "scaling": frozenset({0, 3}),
    "gate train.py --against": frozenset({0}),
}
"""Exit codes by how a command begins, where they are not 0 alone."""
FIRST = ("gate train.py --update", "profile train.py", "profile --nproc 1 train.py")
"""What has to be done before others: in this order."""
NOT_DONE: Mapping[str, str] = {
    "ddpdoctor profile --demo": "needs a terminal: tests/tui",
    "ddpdoctor profile": "attaches to a job that runs: tests/monitor",
    "ddpdoctor autopsy --live": "needs a job that hangs: tests/autopsy/test_live.py",
    "ddpdoctor autopsy --live PID": "needs a job that hangs: tests/autopsy/test_live.py",
    "ddpdoctor profile --attach attach.key": "needs a second machine: tests/nodes",
    "ddpdoctor profile --head node0:29600 -- torchrun …": "needs two nodes: tests/nodes",
    "ddpdoctor profile --run-dir RUN": "takes the place of a head that died: tests/nodes",
    "ddpdoctor report RUN-OF-NODE0 RUN-OF-NODE1": "needs two nodes: tests/nodes",
    'ddpdoctor profile --on-hang "scancel $SLURM_JOB_ID" -- srun python train.py': "needs Slurm: tests/clusters",
    'ddpdoctor autopsy "slurm-$SLURM_JOB_ID.out" --output-format json > autopsy.json': "needs Slurm: tests/clusters",
}
"""Commands that are only parsed, with the reason."""
NAMES = frozenset(
    {f"ddpdoctor {name}" for name in ("check", "check --static", "check --equivalence", "gate", "autopsy")}
)
"""What a sentence names, without what it is to be done with."""


class Done(NamedTuple):
    """A command as it is done, and the exit codes that are right."""

    command: str
    codes: frozenset[int]


def done(command: str) -> Done | None:
    """Return how a printed command is done; None where it is not."""
    if command in NOT_DONE or command in NAMES or "node0" in command:
        return None
    codes = next((codes for start, codes in CODES.items() if command.startswith(f"ddpdoctor {start}")), frozenset({0}))
    for printed, real in STANDS_FOR:
        command = re.sub(printed, real, command)
    return Done(command, codes)
