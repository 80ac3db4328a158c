"""A fault of the hook of collectives costs the record, never the collective."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
