"""What ``faulthandler`` wrote of a rank that crashed: the signal, and where each of its threads was."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ddpdoctor.monitor.stacks import parse_faulthandler, users_stacks
from ddpdoctor.record import layout
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.stacks import StackDump

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
_FORKED = "popen_fork.py"
"""A child that a rank forked has the rank's file, and this module of Python's in its main thread's stack."""


class LastWords(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one process."""

    signal: int
    stacks: tuple[StackDump, ...]


def read_last_words(directory: Path, pid: int) -> LastWords | None:
    """What a process wrote when it crashed; None where it did not, or had no time to."""
    try:
        with (directory / layout.last_words_name(pid)).open("rb") as file:
            text = file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return None
    for head in reversed(list(_HEAD.finditer(text))):
        number = _SIGNALS.get(head["what"].strip())
        told = text[head.end() :].partition("Fatal Python error: ")[0]
        if number is not None and _FORKED not in told:
            native = "Current thread" not in told
            stacks = users_stacks(parse_faulthandler(told, -1))
            ended = tuple(msgspec.structs.replace(stack, native_end=native) for stack in stacks)
            return LastWords(signal=number, stacks=ended)
    return None


def with_last_words(record: RunRecord, words: Mapping[int, LastWords | None]) -> RunRecord:
    """The record with the stacks of the ranks that crashed."""
    stacks = list(record.stacks)
    for rank in record.ranks:
        said = words.get(rank.pid)
        if said is not None and rank.end == "signalled" and not rank.main_finished:
            stacks += (msgspec.structs.replace(stack, rank=rank.rank) for stack in said.stacks)
    return msgspec.structs.replace(record, stacks=tuple(stacks))
