"""The statement by which a rank left early, and the test at which ranks parted, of a run alone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ddpdoctor.examine.rehearsal_result import with_leaving
from ddpdoctor.finding import Fact, Finding, Frame, Location, Severity
from tests.check_command import check

SCRIPT = """\
import sys


def train(asked):
    for step in range(9):
        if asked(step):
            {leave}
        work(step)
    if step > 3:
        return


train(print)
"""


def left(ranks: tuple[int, ...] = (1,), basis: str = "rehearsal") -> Finding:
    return Finding(
        code="DDP306",
        name="early-exit",
        trouble="early-exit",
        severity=Severity.ERROR,
        title="rank 1 left",
        ranks=ranks,
        locations=(Location(file="/job/other.py", line=3),),
        basis=frozenset({basis}),  # type: ignore[arg-type]
        evidence=(),
        remedy="leave together",
    )


@pytest.mark.parametrize("leave", ["return", "break", "sys.exit(0)"])
def test_the_way_out_that_a_rank_took_alone_leads(leave: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(leave=leave), encoding="utf-8")
    # Rank 0 waits in a turn that rank 1 never made.
    (finding,) = with_leaving([left()], {str(script): {7: (1,), 9: (1,), 10: (1,), 13: (1,)}})
    assert [place.line for place in finding.locations] == [7, 3]
    assert [fact.text for fact in finding.evidence] == [
        f"rank 1 alone ran `{leave}`",
        "`asked(step)` decides, which every rank asked",
    ]


def test_what_several_ranks_ran_or_the_source_explains_or_nobody_knows_is_left_as_it_is(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(leave="return"), encoding="utf-8")
    whose = {str(script): {7: (1,)}}
    for finding, alone in (
        (left(), {str(script): {7: (1, 2)}}),
        (left(), {str(script): {8: (1,)}}),
        (left(), {str(script): {6: (1,), 7: (1,)}}),
        (left(), {}),
        (left(basis="source"), whose),
        (left(ranks=(0, 1)), whose),
    ):
        assert with_leaving([finding], alone) == (finding,)


PARTING = """\
import os


class Job:
    def save(self, folder):
        if os.path.exists(folder):
            self.best = folder

    def step(self):
        overflow = self.overflows()
        if overflow:
            return
        self.reduce()

    def train(self):
        self.step()
        if self.best is not None:
            self.load()
        self.evaluate()
"""


def parted(file: str, stacks: dict[int, tuple[int, ...]], text: str = "calls barrier") -> Finding:
    facts = tuple(
        Fact(text=f"rank {rank} {text}", basis="rehearsal", rank=rank, stack=tuple(Frame(file, line) for line in lines))
        for rank, lines in stacks.items()
    )
    return msgspec.structs.replace(
        left((0, 1)),
        code="DDP301",
        name="rank-divergent-collective",
        trouble="rank-branch",
        title="the ranks diverge",
        locations=(Location(file=file, line=18),),
        evidence=facts,
        remedy="make every rank call it",
    )


def test_the_test_at_which_ranks_parted_is_named_and_what_set_what_it_asks_before_it(tmp_path: Path) -> None:
    script = str(tmp_path / "train.py")
    Path(script).write_text(PARTING, encoding="utf-8")
    cases: tuple[tuple[dict[int, tuple[int, ...]], dict[int, tuple[int, ...]], int], ...] = (
        ({0: (18,), 1: (19,)}, {}, 17),
        ({0: (18,), 1: (19,)}, {7: (0,)}, 6),
        ({0: (13, 16), 1: (19,)}, {12: (1,)}, 11),
    )
    for stacks, alone, line in cases:
        (finding,) = with_leaving([parted(script, stacks)], {script: alone})
        told = finding.evidence[0].location
        assert told is not None
        assert (told.line, f"(line {line}) alike: broadcast" in finding.remedy) == (line, True)


def test_a_test_that_the_other_ranks_have_not_come_to_yet_is_not_blamed(tmp_path: Path) -> None:
    script = str(tmp_path / "train.py")
    Path(script).write_text(PARTING, encoding="utf-8")
    cases: tuple[tuple[dict[int, tuple[int, ...]], dict[int, tuple[int, ...]], str], ...] = (
        ({0: (18,), 1: (16,)}, {}, "calls barrier"),
        ({0: (13, 16), 1: (19,)}, {}, "calls barrier"),
        ({0: (13, 16), 1: (19,)}, {12: (1,)}, "calls recv from rank 1"),
        ({0: (19,), 1: (19,)}, {7: (0,)}, "calls barrier"),
    )
    for stacks, alone, text in cases:
        finding = parted(script, stacks, text)
        assert with_leaving([finding], {script: alone}) == (finding,)


UNREAD = """
import torch
import torch.distributed as dist
from torch import nn


class Job:
    def __init__(self):
        self.model = nn.Linear(8, 1)
        self.best = None

    def train(self):
        self.best = vars(self)["seen"].get("best")
        if self.best is not None:
            self.load()
        return self.evaluate()

    def load(self):
        dist.barrier()

    def evaluate(self):
        total = torch.zeros(2)
        dist.all_reduce(total)
        return total


dist.init_process_group("gloo")
job = Job()
job.seen = {"best": "best.pt"} if torch.randn(1, generator=torch.Generator().manual_seed(dist.get_rank())) > 1.0 else {}
job.train()
dist.destroy_process_group()
"""


def test_ranks_that_part_by_what_they_alone_have_seen_show_the_test(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(UNREAD, encoding="utf-8")
    _, report = check("train.py", cwd=tmp_path)
    (finding,) = [one for one in report["findings"] if one["severity"] == "error"]
    assert "`self.best is not None` (line 14) alike: broadcast" in finding["remedy"]
