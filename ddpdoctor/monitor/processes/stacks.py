"""Asks the ranks for their threads' stacks, and takes what ``faulthandler`` gives where a rank cannot answer."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from ddpdoctor.files.untrusted import read_start
from ddpdoctor.finding import Frame
from ddpdoctor.launch.pid_namespaces import OuterPids
from ddpdoctor.launch.processes import handles
from ddpdoctor.record import layout
from ddpdoctor.record.clock import epoch_ns
from ddpdoctor.record.ring_reader import Beating
from ddpdoctor.record.streams.setup import StackDump

_OURS = str(Path(__file__).resolve().parents[2]) + os.sep
_ANSWER_WITHIN_S = 0.6
_SIGNAL_WITHIN_S = 0.4
_STILL_NS = 2_000_000_000
"""A heart that has not beaten for so long will not answer either: it beats five times a second at least."""
ASK_AGAIN_NS = 10_000_000_000
_MOST_BYTES = 1 << 18
_THREAD = re.compile(r"^(Current thread|Thread) (0x[0-9a-f]+)")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')


def ask_for_stacks(rings: Mapping[int, Beating], number: int) -> tuple[int, ...]:
    """Ask every living rank for its stacks and wait until they are written; the processes that did not answer.

    A rank whose heart has stopped is asked too, and not waited for.
    """
    for ring in rings.values():
        ring.ask_for_stacks(number)
    deadline = time.monotonic() + _ANSWER_WITHIN_S
    silent = list(rings)
    while any(_beats(rings[pid]) for pid in silent) and time.monotonic() < deadline:
        time.sleep(0.02)
        silent = [pid for pid in silent if rings[pid].heartbeat().answered < number]
    return tuple(silent)


def _beats(ring: Beating) -> bool:
    return epoch_ns() - ring.heartbeat().beat_at_ns < _STILL_NS


def signal_for_stacks(
    directory: Path, ranks: Mapping[int, int], outer_pid: Callable[[int], int | None] = lambda pid: pid
) -> list[StackDump]:
    """Stacks of processes (given with their rank) whose interpreter is held, written by their signal handler.

    ``outer_pid`` gives the number out here of a process that knows itself by another one.
    """
    asked: dict[int, int] = {}
    for pid, rank in ranks.items():
        outer = outer_pid(pid)
        try:
            # Without the file there is no handler of ours, and without any the signal would kill the process.
            licensed = outer is not None and (directory / layout.stacks_name(pid)).exists()
            if outer is not None and licensed and handles(outer, signal.SIGUSR2):
                os.kill(outer, signal.SIGUSR2)
                asked[pid] = rank
        except OSError:
            continue
    if asked:
        time.sleep(_SIGNAL_WITHIN_S)
    dumps = []
    for pid, rank in asked.items():
        try:
            content = read_start(directory / layout.stacks_name(pid), _MOST_BYTES, directory)
        except OSError:
            continue
        dumps += parse_faulthandler(content.decode(errors="replace"), rank)
    return dumps


class SignalledStacks:
    """Has the stacks of ranks written whose interpreter is held, one look after another.

    The signal goes to the thread of ours: what the training thread does is not interrupted.
    """

    def __init__(self, directory: Path, outer: OuterPids | None = None) -> None:
        self._directory = directory
        self._outer = OuterPids(directory) if outer is None else outer
        self._asked: dict[int, tuple[int, int]] = {}
        """By process how long its file was when it was asked, and when that was."""
        self._taken: dict[int, tuple[StackDump, ...]] = {}

    def ask(self, pid: int, thread: int, now_ns: int) -> None:
        """Ask a process whose thread of ours is ``thread``, unless it was asked a moment ago."""
        if now_ns - self._asked.get(pid, (0, 0))[1] < ASK_AGAIN_NS:
            return
        try:
            # Without the file there is no handler of ours, and without any the signal would kill the process.
            size = (self._directory / layout.stacks_name(pid)).stat().st_size
            self._asked[pid] = size, now_ns
            outer = self._outer(pid)
            if thread and outer is not None and handles(outer, signal.SIGUSR2):
                number = self._outer.thread(outer, thread)
                if number is not None:
                    _signal_thread(outer, number)
        except (OSError, AttributeError):
            self._asked[pid] = 0, now_ns

    def written(self, pid: int) -> int:
        """Bytes that a process has written for us."""
        try:
            return (self._directory / layout.stacks_name(pid)).stat().st_size if pid in self._asked else 0
        except OSError:
            return 0

    def take(self, pid: int, rank: int) -> tuple[StackDump, ...]:
        """Return what a process wrote when it was asked last."""
        if pid in self._asked:
            size, asked_ns = self._asked[pid]
            try:
                path = self._directory / layout.stacks_name(pid)
                text = read_start(path, _MOST_BYTES, self._directory, size).decode(errors="replace")
            except OSError:
                text = ""
            dumps = parse_faulthandler(text, rank)
            if dumps:
                self._taken[pid] = tuple(msgspec.structs.replace(dump, time_ns=asked_ns) for dump in dumps)
        return self._taken.get(pid, ())


def _signal_thread(pid: int, thread: int) -> None:
    """Send SIGUSR2 to one thread of a process; raises AttributeError where the C library cannot."""
    import ctypes

    if ctypes.CDLL(None, use_errno=True).tgkill(pid, thread, int(signal.SIGUSR2)):
        raise OSError(ctypes.get_errno(), "tgkill")


def parse_faulthandler(text: str, rank: int) -> list[StackDump]:
    """Return the stacks in what ``faulthandler`` wrote; the last thread it lists is the main thread."""
    threads: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if head := _THREAD.match(line):
            threads.append((head[2], []))
        elif threads and (frame := _FRAME.match(line)):
            threads[-1][1].append(Frame(frame["file"], int(frame["line"]), frame["function"]))
    return [
        StackDump(rank=rank, thread=name, main=index == len(threads) - 1, frames=tuple(frames), time_ns=epoch_ns())
        for index, (name, frames) in enumerate(threads)
    ]


def with_training_thread(stacks: Iterable[StackDump], thread: int) -> list[StackDump]:
    """Return the stacks of which the one of the thread that trains counts as the main one; 0 for the main thread."""
    if not thread:
        return list(stacks)
    name = f"0x{thread:016x}"
    return [msgspec.structs.replace(stack, main=stack.thread == name) for stack in stacks]


def users_stacks(stacks: Iterable[StackDump]) -> tuple[StackDump, ...]:
    """Return the stacks without our own lines and threads."""
    kept = []
    for stack in stacks:
        # What a thread was started with; ours also stand inside of the user's calls.
        first = next((frame for frame in reversed(stack.frames) if not frame.file.endswith("threading.py")), None)
        if stack.main or first is None or not first.file.startswith(_OURS):
            frames = tuple(frame for frame in stack.frames if not frame.file.startswith(_OURS))
            kept.append(msgspec.structs.replace(stack, frames=frames))
    return tuple(kept)
