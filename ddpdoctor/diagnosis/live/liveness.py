"""Whether a rank that the others wait for works or stands still."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

IDLE_CPU_SHARE = 0.01
"""Share of one core below which a process tree does nothing."""
POLLING_CPU_SHARE = 0.1
"""Share of one core below which a process tree does nothing but ask and sleep."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
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


def judge_liveness(samples: Sequence[Sample], stall_after_s: float) -> Literal["busy", "stuck"]:
    """Judge the last ``stall_after_s`` seconds of samples, oldest first.

    Stuck needs all of it: samples that reach back that far, under 1 % of a core, no input or output, nothing that would
    wake it, and one stack that was taken at least twice and never changed. Anything else is busy.
    """
    window = _last_seconds(samples, stall_after_s)
    if not _is_idle(window, IDLE_CPU_SHARE) or any(sample.wakes for sample in window):
        return "busy"
    stacks = [sample.stack_hash for sample in window if sample.stack_hash]
    if len(stacks) < 2 or len(set(stacks)) != 1:
        return "busy"
    return "stuck"


def at_rest(samples: Sequence[Sample], stall_after_s: float) -> bool:
    """Return whether a process tree has done nothing for ``stall_after_s`` seconds but ask for something and sleep."""
    return _is_idle(_last_seconds(samples, stall_after_s), POLLING_CPU_SHARE)


def _last_seconds(samples: Sequence[Sample], seconds: float) -> Sequence[Sample]:
    """The newest samples that span so many seconds; empty when there are none yet."""
    for start in range(len(samples) - 1, -1, -1):
        if samples[-1].time_ns - samples[start].time_ns >= seconds * 1e9:
            return samples[start:]
    return ()


def _is_idle(window: Sequence[Sample], cpu_share: float) -> bool:
    if not window:
        return False
    first, last = window[0], window[-1]
    # Less than before: a process of the tree is gone, which had something to do.
    worked = abs(last.cpu_ns - first.cpu_ns) > cpu_share * (last.time_ns - first.time_ns)
    return not worked and last.io_bytes == first.io_bytes
