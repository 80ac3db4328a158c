"""Which process is a rank when several say so, and that a watched run counts each rank once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from ddpdoctor.monitor.live_run import LiveRun
from ddpdoctor.record import events, layout
from ddpdoctor.record.assembly.completeness import rival_launchers, superseded
from ddpdoctor.record.assembly.ranks import RankBook
from ddpdoctor.record.reader import RunPlan
from ddpdoctor.record.writer import Ring


def book(*processes: tuple[int, int | None, int, bool]) -> RankBook:
    """Processes in the order of their start: process id, rank, parent, and whether it is in a process group."""
    made = RankBook()
    for number, (pid, rank, parent, has_world) in enumerate(processes, 1):
        made.take(pid, events.Process(parent=parent, kind="start", time_ns=number, rank=rank))
        if has_world and rank is not None:
            made.take(pid, events.World(rank=rank, local_rank=0, world_size=2, backend="gloo"))
    return made


def test_ranks_that_were_started_again_take_the_places_of_the_first_with_their_workers() -> None:
    first = ((10, 0, 1, True), (11, 1, 1, True), (12, None, 10, False))
    assert superseded(book(*first)) == frozenset()
    assert superseded(book(*first, (20, 0, 1, False))) == {10, 12}
    assert superseded(book(*first, (20, 0, 1, True), (21, 1, 1, True))) == {10, 11, 12}


def test_ranks_that_a_shell_starts_beside_each_other_all_with_local_rank_0_live() -> None:
    both = book((10, 0, 1, False), (11, 1, 1, False))
    both.processes[10].place = both.processes[11].place = 0
    assert superseded(both) == {10}
    assert superseded(both, is_alive=lambda pid: True) == frozenset()


def test_a_helper_that_a_rank_starts_is_no_rank_and_a_wrapper_around_one_neither() -> None:
    assert superseded(book((10, 0, 1, True), (11, 1, 1, True), (15, 0, 10, True))) == {15}
    assert superseded(book((10, 0, 1, False), (15, 0, 10, True))) == {10}


def test_ranks_of_a_job_that_a_rank_has_launched_take_no_place() -> None:
    """An evaluation that rank 0 starts by torchrun, which tells nothing of itself."""
    made = book((10, 0, 1, True), (11, 1, 1, True))
    made.take(100, events.Process(parent=90, owner=10, kind="start", time_ns=9))
    made.take(100, events.World(rank=0, local_rank=0, world_size=1, backend="gloo"))
    assert rival_launchers(made, lambda pid: True) == frozenset()
    assert superseded(made) == {100}


def test_of_two_jobs_that_run_at_once_no_job_is_made() -> None:
    """Rank 1 of the first is the last to start, so that it is the newest of all."""
    both = book((10, 0, 1, True), (20, 0, 2, True), (21, 1, 2, True), (11, 1, 1, True))
    assert superseded(both) == {10, 21}
    rivals = rival_launchers(book((10, 0, 1, True), (20, 0, 2, True)), lambda pid: True)
    assert rivals == {1}
    assert superseded(both, rivals) == {10, 11}


def test_a_launcher_whose_ranks_have_ended_and_one_that_wraps_another_are_no_rivals() -> None:
    again = book((10, 0, 1, True), (20, 0, 2, True))
    assert rival_launchers(again, lambda pid: False) == frozenset()
    wrapped = book((10, 0, 1, False), (11, 1, 1, True), (15, 0, 10, True))
    assert rival_launchers(wrapped, lambda pid: True) == frozenset()
    assert rival_launchers(book((10, 0, 1, True), (15, 0, 10, True)), lambda pid: True) == frozenset()


def test_a_child_that_a_rank_has_forked_to_train_is_the_rank_and_no_rival_of_its_parent() -> None:
    made = book((10, 0, 1, False), (11, 1, 1, False))
    for pid, parent, rank in ((20, 10, 0), (21, 11, 1)):
        made.take(pid, events.Process(parent=parent, kind="fork", time_ns=pid))
        made.take(pid, events.World(rank=rank, local_rank=rank, world_size=2, backend="gloo"))
    assert rival_launchers(made, lambda pid: True) == frozenset()
    assert superseded(made) == {10, 11}


def _written(run: Path, pid: int, rank: int, parent: int, steps: int) -> None:
    events: list[dict[str, object]] = [
        {"event": "process", "pid": pid, "parent": parent, "kind": "start", "rank": rank},
        {"event": "torch", "version": "2.13.0"},
        {"event": "world", "rank": rank, "world_size": 2, "backend": "gloo", "local_rank": rank},
    ]
    lines = (json.dumps({"time_ns": time.time_ns(), **event}) + "\n" for event in events)
    (run / layout.EVENTS_FILE.format(pid)).write_text("".join(lines))
    ring = Ring(str(run / layout.STEPS_FILE.format(pid)), layout.STEPS)
    for step in range(steps):
        ring.put((step + 1, *([time.time_ns()] * 2), *([0] * (len(layout.STEP_FIELDS) - 3))))
    ring.flush()


def test_two_runs_in_one_directory_give_each_rank_once_with_the_figures_of_the_newer(tmp_path: Path) -> None:
    for rank in (0, 1):
        _written(tmp_path, 10_000_000 + rank, rank, 1, steps=7)
    live = LiveRun(tmp_path, RunPlan())
    first = live.look(time.time_ns())
    for rank in (0, 1):
        _written(tmp_path, 20_000_000 + rank, rank, os.getpid(), steps=3)
    second = live.look(time.time_ns())
    said = live.faults(second)
    live.close()
    assert ([rank.rank for rank in first.ranks], [len(track) for track in first.step_tracks]) == ([0, 1], [7, 7])
    assert ([rank.rank for rank in second.ranks], [len(track) for track in second.step_tracks]) == ([0, 1], [3, 3])
    assert said[0].startswith("another job has started here, and these are its figures")


REBORN = """
import os, sys
from ddpdoctor.record import layout
from ddpdoctor.record.writer import epoch_ns
from ddpdoctor.record.writer import Ring
from ddpdoctor.record.writer import EventWriter

run, life = sys.argv[1], int(sys.argv[2])
steps = {1: 7, 2: 3}[life]
writer = EventWriter(run)
writer.write("process", parent=1, kind="start", rank=0, local_rank=0)
writer.write("torch", version="2.13.0")
writer.write("world", rank=0, world_size=1, backend="gloo", local_rank=0)
writer.write("group", number=0, ranks=[0], backend="gloo", timeout_ns=0)
writer.write("site", number=0, frames=[["train.py", life, "<module>"]])
signature = {"kind": "all_reduce", "size_bytes": 4}
writer.write("signature", number=0, **signature)
rows = [[number, 0, number, 0, 0, epoch_ns(), 1] for number in range(steps)]
writer.write("flight", recorder=0, continues=True, completed=[], rows=rows)
ring = Ring(os.path.join(run, layout.STEPS_FILE.format(os.getpid())), layout.STEPS)
for step in range(steps):
    ring.put((step + 1, epoch_ns(), epoch_ns(), *([0] * (len(layout.STEP_FIELDS) - 3))))
ring.flush()
ring.write_head()
print("written", flush=True)
sys.stdin.readline()
if life == 1:
    os.execv(sys.executable, [sys.executable, "-c", sys.orig_argv[2], run, "2"])
"""


def test_a_rank_that_has_made_itself_anew_by_exec_is_known_by_its_new_life_only(tmp_path: Path) -> None:
    command = (sys.executable, "-c", REBORN, str(tmp_path), "1")
    live, seen = LiveRun(tmp_path, RunPlan()), []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        for _ in range(2):
            assert process.stdout.readline() == "written\n"
            record = live.look(time.time_ns())
            (track,), (flights,) = record.step_tracks, record.collectives
            places = {record.site(site).frames[0].line for site in flights.site}
            ordinals = [group.ordinal for group in record.groups]
            seen.append((list(track.step), list(flights.sequence), places, ordinals))
            process.stdin.write("go on\n")
            process.stdin.flush()
    live.close()
    assert seen == [
        ([1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6], {1}, [0]),
        ([1, 2, 3], [0, 1, 2], {2}, [0]),
    ]
