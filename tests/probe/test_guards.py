"""Each guard of the probe says what a fault behind it harms, and the record has exactly that as incomplete."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from ddpdoctor.examine.one_script import ExamineRequest, examine_and_record
from ddpdoctor.probe.journal import Journal
from ddpdoctor.record.assembly.assemble import Assembly
from ddpdoctor.record.model import STREAMS, Job

PROBE = Path(__file__).parents[2] / "ddpdoctor" / "probe"
ANYTHING = {"before_os_exit"}
"""What runs behind the guard is another's, so that every stream may lack something."""

BROKEN = """
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

# Every guard fails the first time that it is used after this line.
named = [module for name, module in list(sys.modules.items()) if name.endswith("probe.journal")]
journal = named[0]
guarded, failed = journal.Journal.guarded, set()


def fail_once(self, note, *arguments, harms=None):
    frame = sys._getframe(1)
    place = frame.f_code.co_filename, frame.f_lineno, note.__name__
    if place in failed or note.__name__ in ("report", "_end_ns"):
        return guarded(self, note, *arguments, harms=harms)
    failed.add(place)

    def broken(*_):
        raise KeyError("broken")

    return guarded(self, broken, harms=harms)


dist.init_process_group("gloo")
journal.Journal.guarded = fail_once
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.ones(32, 4))
loader = torch.utils.data.DataLoader(data, 4, sampler=torch.utils.data.DistributedSampler(data))
for epoch in range(2):
    for (inputs,) in loader:
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""


class Guard(NamedTuple):
    """A call of ``guarded``, ``on_call`` or ``fault`` in the probe."""

    place: str
    what: str
    """The guarded function, or the name of the fault."""
    harms: tuple[str, ...] | None
    """None where it does not say."""


def guards() -> Iterator[Guard]:
    """Every guard of the probe; that of ``on_call`` itself says what those who listen say."""
    for path in sorted(PROBE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        named = {ast.unparse(one.targets[0]): one.value for one in tree.body if isinstance(one, ast.Assign)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = ast.unparse(node.func).rpartition(".")[2]
            shared = name == "partial" and ast.unparse(node.args[0]) == "on_call"
            if shared or name in ("guarded", "on_call") or (name == "fault" and isinstance(node.args[0], ast.Constant)):
                given = {entry.arg: entry.value for entry in node.keywords}
                if path.name == "torch_compat.py" and isinstance(given.get("harms"), ast.Name):
                    continue
                said = given.get("harms")
                harms = None if said is None else tuple(ast.literal_eval(named.get(ast.unparse(said), said)))
                what = ast.unparse(given.get("before") or given.get("after") or node.args[0]).rpartition(".")[2]
                yield Guard(f"{path.relative_to(PROBE)}:{node.lineno}", what, harms)


def test_every_guard_names_streams_that_exist() -> None:
    found = list(guards())
    assert len(found) > 90
    assert [guard for guard in found if guard.harms is None and guard.what not in ANYTHING] == []
    assert [guard for guard in found if set(guard.harms or ()) - set(STREAMS)] == []


def test_a_fault_behind_each_guard_marks_exactly_its_streams(tmp_path: Path) -> None:
    wrong = []
    for number, harms in enumerate(sorted({guard.harms for guard in guards() if guard.harms is not None})):
        directory = tmp_path / str(number)
        directory.mkdir()
        journal = Journal(str(directory), {"kind": "rehearsal"})
        journal.event("world", rank=0, local_rank=0, world_size=1, backend="gloo")
        before = _incomplete(directory)
        assert journal.guarded(lambda: 1 // 0, harms=harms) is None
        if _incomplete(directory) - before != set(harms) - before:
            wrong.append(harms)
    assert wrong == []


def test_a_guard_that_names_nothing_marks_every_stream(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path), {"kind": "rehearsal"})
    journal.event("world", rank=0, local_rank=0, world_size=1, backend="gloo")
    journal.guarded(lambda: 1 // 0)
    assert _incomplete(tmp_path) == set(STREAMS)


def test_a_job_whose_guards_all_fail_once_trains_on_and_only_their_streams_are_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(BROKEN)
    examination, record = examine_and_record(ExamineRequest(target="train.py"))
    assert record is not None
    assert "part of the observation failed" in examination.rehearsal.reason
    assert [rank.main_finished for rank in record.ranks] == [True, True]
    incomplete = {name for name in STREAMS if record.stream(name).state == "truncated"}
    assert {"loaders", "passes", "wraps", "forwards", "backwards", "optimizer_steps"} <= incomplete
    named = {name for guard in guards() for name in guard.harms or ()}
    assert incomplete <= named
    assert record.stream("collectives").state == "complete"
    assert "broken" in record.stream("loaders").reason


def _incomplete(directory: Path) -> set[str]:
    assembly = Assembly(directory)
    assembly.poll()
    record = assembly.record(Job(kind="rehearsal"))
    return {name for name in STREAMS if record.stream(name).state != "complete"}
