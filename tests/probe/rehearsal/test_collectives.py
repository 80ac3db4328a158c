"""What a rehearsal notes of collectives: by which hook, in which loop, in which memory, among how many ranks."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.checks.collectives import discarded_collective_result, sum_as_mean
from ddpdoctor.examine.one_script import ExamineRequest, examine
from ddpdoctor.finding import Finding
from ddpdoctor.probe.rehearsal.collective_hook import puts_together
from ddpdoctor.probe.rehearsal.equivalence.named_ranks import _reads_number, as_one
from ddpdoctor.probe.rehearsal.loop_subjects import loop_targets
from tests.faults.script import training_script

from .conftest import HEAD, Rehearse

# A fault of the hook of collectives costs the record, never the collective.
_RANK = """
import sys
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from ddpdoctor.probe.groups import GroupBook
from ddpdoctor.probe.journal import Journal
from ddpdoctor.probe.rehearsal import collective_hook
from ddpdoctor.probe.rehearsal.loop_subjects import Subjects
from ddpdoctor.probe.rehearsal.training.reduction import ReducedLosses
from ddpdoctor.record.writer import CollectiveRing

directory, broken = sys.argv[1:]


def fail(*arguments):
    raise ValueError("a fault of ours")


dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
journal = Journal(directory, {"project_root": directory})
journal.rank, journal.ring = 0, CollectiveRing(directory)
groups = GroupBook(journal, torch)
hook = collective_hook.CollectiveHook(
    journal, torch, ReducedLosses(journal), Subjects(journal, torch, lambda tensor: ""), groups
)
if broken == "before":
    collective_hook.origin_of = fail
elif broken == "after":
    hook._unbox_work = fail
hook.install()
groups.note_world()
for number in range(20):
    value = torch.full((3,), float(number))
    dist.all_reduce(value)
    assert value.tolist() == [number] * 3
print(journal.ring.count)
"""


@pytest.mark.parametrize(("broken", "rows", "faults"), [("nothing", 20, 0), ("before", 0, 9), ("after", 9, 9)])
def test_a_fault_before_or_after_a_collective_leaves_it_alone(
    broken: str, rows: int, faults: int, tmp_path: Path
) -> None:
    done = subprocess.run([sys.executable, "-c", _RANK, tmp_path, broken], capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(rows)], done.stderr
    events = [json.loads(line) for path in tmp_path.glob("events-*.jsonl") for line in path.read_text().splitlines()]
    assert sum(event["event"] == "probe_fault" and event["harms"] == ["collectives"] for event in events) == faults


# Collectives that work and should not be there, all in one script, and their correct twins in another.
CODES = ("DDP303", "DDP307", "DDP309", "DDP313", "DDP316")
TIMEOUT = """
from datetime import timedelta
impatient = dist.new_group([0, 1], timeout=timedelta(seconds=SECONDS))
alone = dist.new_group([0])
dist.barrier(group=impatient)
if rank == 1:
    end = time.monotonic() + 2.5
    while time.monotonic() < end: sum(range(1000))
dist.barrier(group=impatient)  # DDP307
"""
BROKEN = {
    "after_wrap": TIMEOUT.replace("SECONDS", "4"),
    "within": "with torch.no_grad():\n    if rank == 0 and step == 3: model(x)  # DDP303",
    "between": "dist.all_reduce(loss)  # DDP316",
    "end_of_step": "dist.all_reduce(value, group=alone)  # DDP309\ndist.barrier()  # DDP313",
}
CORRECT = {
    "after_wrap": TIMEOUT.replace("SECONDS", "60").replace("  # DDP307", ""),
    "within": "with torch.no_grad():\n    if step == 3: model(x)\n    if rank == 0: model.module(x)",
    "between": "dist.all_reduce(loss.detach().clone())",
    "end_of_step": "if rank == 0: dist.all_reduce(value, group=alone)\nif step == 3: dist.barrier()",
}


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def found_in_the_run(lines: dict[str, str]) -> tuple[set[str], set[tuple[str, int]]]:
    script = training_script("nn.BatchNorm1d(8)", **lines)
    Path("train.py").write_text(script)
    examination = examine(ExamineRequest(target="train.py", select=CODES))
    assert examination.rehearsal.status == "completed", examination.rehearsal
    marked = {
        (code, number)
        for number, line in enumerate(script.splitlines(), 1)
        for code in CODES
        if line.endswith(f"# {code}")
    }
    seen = {finding.code for finding in examination.findings if "rehearsal" in finding.basis}
    places = {(finding.code, place.line) for finding in examination.findings for place in finding.locations}
    assert marked <= places, marked - places
    return seen, marked


def test_each_habit_is_found_at_its_line() -> None:
    seen, marked = found_in_the_run(BROKEN)
    assert seen == set(CODES) == {code for code, _ in marked}


def test_their_correct_twins_are_left_alone() -> None:
    assert found_in_the_run(CORRECT)[0] == set()


# Which values of a script may be the number of its ranks, and what they are for one.


@pytest.mark.parametrize(
    ("value", "one"),
    [
        (2, 1),
        ("2", "1"),
        ("--world-size=2", "--world-size=1"),
        ("trainer.devices=0,1", "trainer.devices=0"),
        ("3, 5", "3"),
        ([0, 1], [0]),
        (["4", "7"], ["4"]),
    ],
)
def test_a_value_that_may_be_the_number(value: Any, one: Any) -> None:
    assert as_one(value, 2) == one


NO_NUMBERS: tuple[Any, ...] = (True, 3, "12", "lr=0.2", "a,b", "0,1,2", [0.5, 0.5], [], None, 2.0, "", "--x=", "2e")


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_a_value_that_is_none(value: Any) -> None:
    assert as_one(value, 2) is None


def test_a_number_that_ranks_read_for_themselves() -> None:
    body = "def main(rank, world): pass\nclass Trainer:\n    def step(self):\n        return [W for _ in '']\n"
    for text, reads in ((f"W = 2\n{body}", True), (f"W = 3\n{body}", False), (f"EPOCHS = 2\n{body}", False)):
        module = types.ModuleType("train")
        exec(text, module.__dict__)
        assert any(_reads_number(module.__dict__["main"], 2)) is reads


# Which loop a collective is a turn of.
LOOPS = {
    "for key in names:\n    dist.all_reduce(values[key])  # here": ("key",),
    "for name, value in values.items():\n    dist.all_reduce(value)  # here": ("name", "value"),
    "for key in names:\n    value = values[key] / 2\n    dist.all_reduce(value)  # here": ("key",),
    "[dist.all_reduce(value) for value in values]  # here": ("value",),
    "for group in groups:\n    for p in group:\n        dist.all_reduce(p.grad)  # here": ("p",),
    "for step in range(3):\n    dist.all_reduce(loss)  # here": (),
    "for key in names:\n    pass\ndist.all_reduce(values[key])  # here": (),
    "def reduce(value):\n    dist.all_reduce(value)  # here\nfor value in values:\n    reduce(value)": (),
}


@pytest.mark.parametrize("source", LOOPS)
def test_the_loop_is_the_one_whose_variable_the_call_is_given(source: str) -> None:
    line = next(number for number, text in enumerate(source.splitlines(), 1) if text.endswith("# here"))
    assert loop_targets(ast.parse(source), line) == LOOPS[source]


STACKED = {
    "values = torch.stack(list(losses.values()))\ndist.all_reduce(values)  # here": True,
    "def reduce(losses):\n    values = torch.cat([losses[k] for k in keys])\n    dist.all_reduce(values)  # here": True,
    "values = torch.stack(parts)\ndef reduce(values):\n    dist.all_reduce(values)  # here": False,
    "values = torch.zeros(3)\ndist.all_reduce(values)  # here": False,
    "dist.all_reduce(values[0])  # here": False,
}


@pytest.mark.parametrize("source", STACKED)
def test_what_is_reduced_was_put_together_in_the_same_function(source: str) -> None:
    line = next(number for number, text in enumerate(source.splitlines(), 1) if text.endswith("# here"))
    assert puts_together(ast.parse(source), line) is STACKED[source]


# What collectives are given that does not lie in memory as they take it, or that they have summed already.
VIEWS = """
dist.init_process_group("gloo")
rank = dist.get_rank()
table = torch.arange(12.0).reshape(4, 3) * (1 + rank)
square = torch.ones(3, 3)
for turn in range(3):
    dist.broadcast(table[:, :2], src=0)  # gaps
    dist.all_reduce(table[:, 2])  # gaps
    dist.all_reduce(table.view(-1)[::2])  # gaps
    dist.reduce(torch.ones(4, 3)[:1].expand(4, 3), dst=0)  # gaps
    dist.broadcast(table.t() if rank == 0 else torch.zeros(3, 4), src=0)  # gaps
    dist.scatter(torch.zeros(4), [table[:, 0], table[:, 1]] if rank == 0 else None, src=0)  # gaps
    dist.all_reduce(table[1:3])
    dist.all_reduce(table[:, 2].contiguous())
    dist.all_reduce(table.t())
    dist.all_reduce(square[:, :])
    dist.all_reduce(torch.ones(4, 1)[:, 0])
    dist.all_reduce(torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last))
    dist.all_gather([torch.zeros(4), torch.zeros(4)], table[:, 0])
    dist.all_gather(list(torch.zeros(4, 2).unbind(1)), table[:, 0])
    if rank == 0:
        dist.all_reduce(square.t())
    else:
        dist.all_reduce(square.mT)
dist.destroy_process_group()
"""


def test_views_with_gaps_or_in_another_order_than_the_other_ranks(rehearse_script: Rehearse) -> None:
    found = list(discarded_collective_result.in_run(rehearse_script(VIEWS)))
    lines = [number for number, line in enumerate((HEAD + VIEWS).splitlines(), 1) if line.endswith("# gaps")]
    assert sorted(one.locations[0].line for one in found if isinstance(one, Finding)) == lines


SUMS = """
dist.init_process_group("gloo")
rank = dist.get_rank()
count, flag = torch.zeros(1), torch.zeros(2)
for turn in range(1, 4):
    hits = torch.tensor(float(3 + rank + turn))
    for value in {"full": hits, "conditional": hits}.values():
        dist.all_reduce(value)  # twice
    pair = torch.tensor([1.0 + rank, 2.0])
    for value in [pair, pair.detach()]:
        dist.all_reduce(value)  # twice
    row = torch.tensor([2.0 + rank])
    dist.all_reduce(row)
    dist.all_reduce(row.view(()))  # twice
    loss = torch.tensor(float(rank + turn))
    mean = loss
    dist.all_reduce(loss)
    dist.all_reduce(mean)  # twice
    for name in ("a", "b"):
        count.fill_(2.0 ** turn if name == "a" else 2.0 ** (turn + 1))
        dist.all_reduce(count)
    for value in {"full": hits.clone(), "conditional": hits.clone()}.values():
        dist.all_reduce(value)
    dist.all_reduce(flag)
    dist.all_reduce(flag)
    largest = torch.tensor(float(rank))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    kept = torch.tensor([1.0 + rank])
    dist.all_reduce(kept)
    kept.data.copy_(torch.tensor([5.0 + rank]))
    dist.all_reduce(kept)
    dist.all_reduce(torch.tensor([1.0]))
    dist.all_reduce(torch.tensor([2.0]))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("body", [SUMS, SUMS.replace("import os", "").replace("dist.all_reduce", "reduce_sum")])
def test_one_tensor_that_is_summed_twice_with_no_change_between(rehearse_script: Rehearse, body: str) -> None:
    helper = "\ndef reduce_sum(tensor, **options):\n    dist.all_reduce(tensor, **options)  # twice\n"
    record = rehearse_script(body if body is SUMS else helper + body.replace("# twice", ""))
    found = [one for one in sum_as_mean.in_run(record) if isinstance(one, Finding)]
    text = HEAD + (body if body is SUMS else helper)
    lines = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# twice")]
    assert sorted({one.locations[0].line for one in found if one.locations}) == lines
