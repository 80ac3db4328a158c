"""Whether a rank that the others wait for works or stands still."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

IDLE_CPU_SHARE = 0.01
"""Share of one core below which a process tree does nothing."""
POLLING_CPU_SHARE = 0.1
"""Share of one core below which a process tree does nothing but ask and sleep."""
LITTLE_BYTES_PER_S = 1_000_000
"""Less is read and written by what exports metrics or writes a log; files of data and checkpoints are more."""
WOKEN_EVERY_NS = 4_000_000_000
"""A thread that runs more often than this gets something; torch's loader asks every five seconds for its workers."""
WOKEN_AT_FIRST = 2


class ProcessSample(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of one rank's process tree at one moment; the counters only grow."""

    time_ns: int
    cpu_ns: int
    """CPU time of the whole process tree since its start."""
    io_bytes: int
    """Bytes read and written by the whole tree since its start."""
    stack_hash: str
    """Digest of the main thread's stack; empty when it was not taken."""
    wakes: bool = False
    """Something in the tree runs, or will be woken by a clock that it set itself."""
    woken_at_ns: int = 0
    """When such a clock of another process of the tree ends; 0 without one."""
    main_cpu_ns: int = 0
    """CPU time of the training thread."""
    main_runs: int = -1
    """How often the training thread was given a core; -1 where that is not known."""
    is_held: bool = False
    """A call holds the interpreter: a thread that wants it asks for it 200 times a second, and gets nothing."""
    child_runs: Mapping[int, int] = {}
    """The same of the main threads of processes below, those left out that wake themselves every few seconds."""
    progress: int = 0
    """Forwards, backwards and steps of optimizers up to now."""
    main_wakes: bool = False
    """The training thread will be woken by a clock, or another one that it may wait for."""


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """A training thread that has stood at one place since a sample, whatever the rest of its process does."""

    first: ProcessSample
    newest: ProcessSample
    restless: bool = False
    """The rest of the tree did something meanwhile."""
    stuck: bool = False
    """For some time it did not."""

    @property
    def lasted_ns(self) -> int:
        """How long it is known to stand."""
        return self.newest.time_ns - self.first.time_ns


def stands_on(before: Standing | None, sample: ProcessSample) -> Standing:
    """Return what a sample makes of a standing: the same one continues, or another one may begin.

    It continues while its stack is the same, the thread itself hardly runs and no clock of its own does, and the tree
    does little: what computes, or moves files, may do what the thread waits for.
    """
    if before is None or not _stands(before.first, sample):
        return Standing(first=sample, newest=sample)
    last = before.newest
    did = sample.io_bytes != last.io_bytes or sample.wakes or _worked(last, sample, IDLE_CPU_SHARE)
    return msgspec.structs.replace(before, newest=sample, restless=before.restless or did)


def _stands(first: ProcessSample, sample: ProcessSample) -> bool:
    place, at = (first.stack_hash, first.progress), (sample.stack_hash, sample.progress)
    if not sample.stack_hash or place != at or sample.main_wakes:
        return False
    lasted_ns = sample.time_ns - first.time_ns
    if min(first.main_runs, sample.main_runs) < 0 or _worked(first, sample, POLLING_CPU_SHARE):
        return False
    if _runs_often(first.main_runs, sample.main_runs, lasted_ns):
        return False
    moved = abs(sample.io_bytes - first.io_bytes)
    return sample.main_cpu_ns - first.main_cpu_ns <= IDLE_CPU_SHARE * lasted_ns and (
        moved <= LITTLE_BYTES_PER_S * lasted_ns / 1e9
    )


def _worked(first: ProcessSample, last: ProcessSample, cpu_share: float) -> bool:
    # Less than before: a process of the tree is gone, which had something to do.
    return abs(last.cpu_ns - first.cpu_ns) > cpu_share * (last.time_ns - first.time_ns)


def judge_liveness(samples: Sequence[ProcessSample], stall_after_s: float) -> Literal["busy", "stuck"]:
    """Judge the last ``stall_after_s`` seconds of samples, oldest first.

    Stuck needs all of it: samples that reach back that far, under 1% of a core, no input or output, nothing that would
    wake it, a training thread and children that no one wakes either, and one stack that was taken at least twice and
    never changed. Anything else is busy.
    """
    window = _last_seconds(samples, stall_after_s)
    if not _is_idle(window, IDLE_CPU_SHARE) or any(sample.wakes for sample in window) or _is_woken(window):
        return "busy"
    stacks = [sample.stack_hash for sample in window if sample.stack_hash]
    if len(stacks) < 2 or len(set(stacks)) != 1:
        return "busy"
    return "stuck"


def at_rest(samples: Sequence[ProcessSample], stall_after_s: float) -> bool:
    """Return whether a process tree has done nothing for ``stall_after_s`` seconds but ask for something and sleep."""
    return _is_idle(_last_seconds(samples, stall_after_s), POLLING_CPU_SHARE)


def _last_seconds(samples: Sequence[ProcessSample], seconds: float) -> Sequence[ProcessSample]:
    """Return the newest samples that span so many seconds; empty when there are none yet."""
    for start in range(len(samples) - 1, -1, -1):
        if samples[-1].time_ns - samples[start].time_ns >= seconds * 1e9:
            return samples[start:]
    return ()


def _is_idle(window: Sequence[ProcessSample], cpu_share: float) -> bool:
    if not window:
        return False
    first, last = window[0], window[-1]
    return not _worked(first, last, cpu_share) and last.io_bytes == first.io_bytes


def _is_woken(window: Sequence[ProcessSample]) -> bool:
    """Return whether someone wakes the training thread or a child, again and again: what a socket gives is no
    file's.
    """
    first, last = window[0], window[-1]
    lasted_ns = last.time_ns - first.time_ns
    is_main = not last.is_held and _runs_often(first.main_runs, last.main_runs, lasted_ns)
    return is_main or any(
        _runs_often(first.child_runs.get(child, -1), runs, lasted_ns) for child, runs in last.child_runs.items()
    )


def _runs_often(before: int, after: int, lasted_ns: int) -> bool:
    return min(before, after) >= 0 and after - before > WOKEN_AT_FIRST + lasted_ns // WOKEN_EVERY_NS
