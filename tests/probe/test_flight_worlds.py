"""Entries of torch's flight recorder are those of this world by their numbers, whatever the system's clock says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

_RANK = """
import json, pickle, sys
from types import SimpleNamespace
import torch, torch.distributed as dist
from ddpdoctor.probe.groups import GroupBook
from ddpdoctor.probe.journal import Journal
from ddpdoctor.probe.live.flight_recorder import Flights

directory, back_s = sys.argv[1], int(sys.argv[2])
journal = Journal(directory, {"project_root": directory})
groups, calls = GroupBook(journal, torch), 0


def recorder(**_):
    # This is what torch's recorder would hold had the clock been set back when the second world was there.
    entries = torch._C._distributed_c10d._dump_fr_trace(includeCollectives=True, includeStackTraces=True)
    entries = pickle.loads(entries)
    for entry in entries["entries"]:
        if entry["record_id"] >= 3:
            entry["time_created_ns"] -= back_s * 1_000_000_000
    return pickle.dumps(entries)


flights = Flights(torch, journal, groups, SimpleNamespace(recorders=(recorder,), recorder_states=()))
for world, calls in enumerate((3, 4)):
    dist.init_process_group("gloo", init_method=f"file://{directory}/store{world}", rank=0, world_size=1)
    groups.note_world()
    flights.note_world()
    for _ in range(calls):
        dist.all_reduce(torch.ones(2))
    if world == 1:
        flights.dump()
    dist.destroy_process_group()
"""


def _sequences(directory: Path, back_s: int) -> list[int]:
    command = [sys.executable, "-c", _RANK, str(directory), str(back_s)]
    environment = {"TORCH_FR_BUFFER_SIZE": "100", "PATH": "/usr/bin:/bin"}
    subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for path in directory.glob("events-*.jsonl") for line in path.read_text().splitlines()]
    events = [event for event in map(json.loads, lines) if event["event"] == "flight"]
    return [row[0] for event in events for row in event["rows"]]


def test_a_clock_that_is_set_back_hides_no_collective_of_this_world(tmp_path: Path) -> None:
    assert _sequences(tmp_path, 86_400) == [3, 4, 5, 6]


def test_what_an_earlier_world_called_is_left_out(tmp_path: Path) -> None:
    assert _sequences(tmp_path, 0) == [3, 4, 5, 6]
