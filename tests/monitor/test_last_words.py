"""What is read of the end of a rank that a signal ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ddpdoctor
from ddpdoctor.monitor.live_run import read_crash_dump
from ddpdoctor.monitor.processes.stacks import parse_faulthandler, users_stacks, with_training_thread
from ddpdoctor.profile.watch import RunSource
from ddpdoctor.record import layout
from ddpdoctor.record.reader import RunPlan
from ddpdoctor.record.writer import Ring

RANK = """
import os, sys, time
sys.path.insert(0, REPOSITORY)
from ddpdoctor.probe.heartbeat import write_crash_dumps
write_crash_dumps(".")
print("ready", flush=True); time.sleep(600)  # here
"""
CUT = """Fatal Python error: Aborted

Thread 0x00007f34fff296c0 (most recent call first):
  File "/torch/codecache.py", line 12 in <module>
  File ???Fatal Python error: Segmentation fault

"""


@pytest.fixture
def rank(tmp_path: Path) -> subprocess.Popen[bytes]:
    repository = str(Path(__file__).resolve().parents[2])
    (tmp_path / "rank.py").write_text(RANK.replace("REPOSITORY", repr(repository)))
    process = subprocess.Popen([sys.executable, "rank.py"], cwd=tmp_path, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    return process


def test_a_sigterm_ends_a_rank_as_before_and_tells_where_it_was(tmp_path: Path, rank: subprocess.Popen[bytes]) -> None:
    rank.terminate()
    rank.communicate()
    assert rank.returncode == -signal.SIGTERM
    words = read_crash_dump(tmp_path, rank.pid)
    assert words is not None and words.signal is None, "who sent it is not known, so it is no cause"
    (stack,) = words.stacks
    line = 1 + RANK.splitlines().index('print("ready", flush=True); time.sleep(600)  # here')
    assert stack.main and stack.of_the_end and not stack.native_end
    assert [(os.path.basename(frame.file), frame.line) for frame in stack.frames] == [("rank.py", line)]


def test_a_crash_while_another_thread_runs_on_says_no_more_than_is_known(tmp_path: Path) -> None:
    (tmp_path / layout.CRASH_DUMP_FILE.format(42)).write_text(CUT)
    words = read_crash_dump(tmp_path, 42)
    assert words is not None and words.signal == signal.SIGABRT
    assert [(stack.main, stack.native_end, stack.frames) for stack in words.stacks] == [(True, True, ())]


def test_a_process_that_said_nothing_has_no_last_words(tmp_path: Path, rank: subprocess.Popen[bytes]) -> None:
    rank.kill()
    rank.communicate()
    deadline = time.monotonic() + 10
    while not (tmp_path / layout.CRASH_DUMP_FILE.format(rank.pid)).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert read_crash_dump(tmp_path, rank.pid) is None


def test_where_another_thread_trains_its_stack_counts_and_not_the_one_that_awaits_it() -> None:
    ours = f"{Path(ddpdoctor.__file__).parent}/probe/live"
    text = f"""
Thread 0x00007feb050286c0 (most recent call first):
  File "{ours}/calls.py", line 127 in collective
  File "/job/train.py", line 54 in main
  File "/lib/threading.py", line 982 in run

Thread 0x00007feb058296c0 (most recent call first):
  File "{ours}/heartbeat.py", line 93 in _run
  File "/lib/threading.py", line 982 in run

Thread 0x00007feb251eab80 (most recent call first):
  File "/lib/threading.py", line 1119 in join
  File "/job/train.py", line 66 in <module>
"""
    stacks = with_training_thread(users_stacks(parse_faulthandler(text, 0)), 0x7FEB050286C0)
    assert [(stack.main, stack.frames[0].line) for stack in stacks] == [(True, 54), (False, 1119)]


ABORTED = """Fatal Python error: Aborted

Thread 0x00007f1ceb7c7b80 (most recent call first):
  File "/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/job/train.py", line 16 in <module>
"""
TERMINATED = """Stack (most recent call first):
  File "/job/train.py", line 16 in <module>
"""


def _ended_in_a_call(run: Path, rank: int, size_bytes: int, words: str) -> None:
    """Write what a rank leaves that was ended in its first collective."""
    pid, now_ns = 10_000_000 + rank, time.time_ns()
    events: list[dict[str, object]] = [
        {"event": "process", "pid": pid, "parent": 1, "kind": "start", "rank": rank},
        {"event": "torch", "version": "2.13.0"},
        {"event": "world", "rank": rank, "world_size": 2, "backend": "gloo", "local_rank": rank},
        {"event": "group", "number": 0, "ranks": [0, 1], "backend": "gloo", "timeout_ns": 1_800_000_000_000},
        {"event": "site", "number": 0, "frames": [["/job/train.py", 16, "<module>"]]},
    ]
    lines = (json.dumps({"time_ns": now_ns, **event}) + "\n" for event in events)
    (run / layout.EVENTS_FILE.format(pid)).write_text("".join(lines))
    steps = Ring(str(run / layout.STEPS_FILE.format(pid)), layout.STEPS)
    steps.write_head((now_ns, *([0] * 20)))
    calls = Ring(str(run / layout.CALLS_FILE.format(pid)), layout.CALLS)
    calls.begin((layout.CALL_KINDS.index("all_reduce"), 0, 0, 1, now_ns, 0, size_bytes, 0))
    calls.write_head()
    (run / layout.CRASH_DUMP_FILE.format(pid)).write_text(words)


def test_ranks_that_end_before_their_flight_recorders_were_read_still_have_a_cause(tmp_path: Path) -> None:
    _ended_in_a_call(tmp_path, 0, 8, ABORTED)
    _ended_in_a_call(tmp_path, 1, 16, TERMINATED)
    source = RunSource(tmp_path, RunPlan(), None, is_over=True, keeps_history=False)
    verdict = source.final_snapshot().verdict
    source.close()
    assert (verdict.state, verdict.code) == ("broken", "DDP304"), verdict.text
    assert "rank 0 died inside all_reduce (8 bytes) at train.py:16" in verdict.text
