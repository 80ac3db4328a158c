"""A script that puts another function in the place of an object's method on some ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.source.script.script import read_script
from tests.source.marked import findings_of

SCRIPT = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Keeper:
    def save(self, model, epoch):
        torch.save(model.state_dict(), "out/last.pt")


class Trainer:
    def __init__(self, model, keeper):
        self.model = model
        self.keeper = keeper

    def fit(self, data):
        for epoch in range(3):
            for x in data:
                self.model(x).sum().backward()
            self.keeper.save(self.model, epoch)


def nothing(*values, **options):
    return None


def chosen(rank):
    keeper = Keeper()
    if rank == 0:
        return keeper
    other = Keeper()
    other.save = nothing
    return other


def main():
    dist.init_process_group("gloo")
    main_rank = dist.get_rank() == 0
    model = DDP(torch.nn.Linear(2, 2))
    {choice}
    Trainer(model, keeper).fit([torch.ones(2)] * 4)
    dist.destroy_process_group()


main()
"""
OTHER = """if {test}:
        keeper = Keeper()
        keeper.save = {function}
    else:
        keeper = Keeper()"""


def codes(choice: str, at: Path) -> set[str]:
    path = at / "train.py"
    path.write_text(SCRIPT.replace("{choice}", choice))
    return {finding.code for finding in findings_of(read_script(path))}


@pytest.mark.parametrize(
    "choice",
    [
        OTHER.format(test="not main_rank", function="nothing"),
        OTHER.format(test="dist.get_rank() > 0", function="nothing"),
        OTHER.format(test="os.environ['RANK'] != '0'", function="lambda *values: None"),
        OTHER.format(test="int(os.environ.get('WORLD_SIZE', 1)) > 1 and not main_rank", function="nothing"),
        "keeper = chosen(dist.get_rank())",
        "keeper, quiet = Keeper(), Keeper()\n    quiet.save = nothing\n    keeper = keeper if main_rank else quiet",
    ],
)
def test_only_the_ranks_that_have_the_method_run_it(choice: str, tmp_path: Path) -> None:
    assert "DDP601" not in codes(choice, tmp_path)


@pytest.mark.parametrize(
    "choice",
    [
        "keeper = Keeper()",
        OTHER.format(test="not main_rank", function="nothing").replace("keeper.save", "keeper.load"),
    ],
)
def test_a_method_that_every_rank_has_is_run_by_every_rank(choice: str, tmp_path: Path) -> None:
    assert "DDP601" in codes(choice, tmp_path)
