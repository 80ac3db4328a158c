"""Stacks of a rank that cannot answer itself."""

from __future__ import annotations

from ddpdoctor.monitor.processes.stacks import parse_faulthandler

DUMP = """Thread 0x00007f0000000001 (most recent call first):
  File "/venv/lib/threading.py", line 10 in wait

Current thread 0x00007f0000000002 (most recent call first):
  File "/job/my train.py", line 57 in step
  File "/job/my train.py", line 80 in <module>
"""


def test_every_thread_is_read_and_the_last_one_is_the_main_thread() -> None:
    first, main = parse_faulthandler(DUMP, 3)
    assert not first.main and main.main and main.rank == 3
    assert [(frame.file, frame.line, frame.function) for frame in main.frames] == [
        ("/job/my train.py", 57, "step"),
        ("/job/my train.py", 80, "<module>"),
    ]


def test_garbage_gives_no_stack() -> None:
    assert parse_faulthandler("\x00\xff what", 0) == []
