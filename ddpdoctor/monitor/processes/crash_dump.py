"""What ``faulthandler`` wrote of a rank that a signal ended: where it was, and of a crash which signal it was."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ddpdoctor.files.untrusted import read_start
from ddpdoctor.monitor.processes.stacks import parse_faulthandler, users_stacks, with_training_thread
from ddpdoctor.record import layout
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.places import StackDump

_HEAD = re.compile(r"^Fatal Python error: (?P<what>[^\n]+)$", re.MULTILINE)
_SIGNALS = {
    "Aborted": signal.SIGABRT,
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Illegal instruction": signal.SIGILL,
    "Floating-point exception": signal.SIGFPE,
    "Floating point exception": signal.SIGFPE,
}
_MOST_BYTES = 1 << 20
_TERMINATED = "Stack (most recent call first):"
"""What is written of the main thread at a SIGTERM."""
_FORKED = "popen_fork.py"
"""A child that a rank forked has the rank's file, and this module of Python's in its main thread's stack."""


class CrashDump(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one process."""

    signal: int | None
    """None of a SIGTERM: it says who ended the process, and nothing of why."""
    stacks: tuple[StackDump, ...]


def read_crash_dump(directory: Path, pid: int) -> CrashDump | None:
    """Return what a process wrote at its end; None where it did not, or had no time to."""
    try:
        text = read_start(directory / layout.crash_dump_name(pid), _MOST_BYTES, directory).decode(errors="replace")
    except OSError:
        return None
    for head in reversed(list(_HEAD.finditer(text))):
        number = _SIGNALS.get(head["what"].strip())
        told, cut, _ = text[head.end() :].partition("Fatal Python error: ")
        if number is not None and _FORKED not in told:
            native = "Current thread" not in told
            stacks = users_stacks(parse_faulthandler(told, -1))
            if cut:
                # The stack of a thread that ran on could not be read; the main thread's would have come after it.
                stacks = (StackDump(rank=-1, thread="main", main=True),)
            ended = (msgspec.structs.replace(stack, native_end=native, of_the_end=True) for stack in stacks)
            return CrashDump(signal=number, stacks=tuple(ended))
    _, terminated, told = text.rpartition(_TERMINATED)
    if terminated and _FORKED not in told:
        main = users_stacks(parse_faulthandler(f"Thread 0x0:\n{told}", -1))
        return CrashDump(signal=None, stacks=tuple(msgspec.structs.replace(one, of_the_end=True) for one in main))
    return None


def with_crash_dumps(
    record: RunRecord, words: Mapping[int, CrashDump | None], training_threads: Mapping[int, int]
) -> RunRecord:
    """Return the record with the stacks of the ranks that a signal ended.

    ``training_threads``: by process the thread that trains, where that is not the main thread.
    """
    stacks = list(record.stacks)
    for rank in record.ranks:
        said = words.get(rank.pid)
        if said is not None and rank.end == "signalled" and not rank.main_finished:
            of_rank = [msgspec.structs.replace(stack, rank=rank.rank) for stack in said.stacks]
            stacks += with_training_thread(of_rank, training_threads.get(rank.pid, 0))
    return msgspec.structs.replace(record, stacks=tuple(stacks))
