"""Whether a rank that the others wait for works or stands still."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

IDLE_CPU_SHARE = 0.01
"""Share of one core below which a process tree does nothing."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of one rank's process tree at one moment; the counters only grow."""

    time_ns: int
    cpu_ns: int
    """CPU time of the whole process tree since its start."""
    io_bytes: int
    """Bytes read and written by the whole tree since its start."""
    stack_hash: str
    """Digest of the main thread's stack; empty when it was not taken."""


def judge_liveness(samples: Sequence[Sample], stall_after_s: float) -> Literal["busy", "stuck"]:
    """Judge the last ``stall_after_s`` seconds of samples, oldest first.

    Stuck needs all of it: samples that reach back that far, under 1 % of a core, no input or output, and one stack that
    was taken at least twice and never changed. Anything else is busy.
    """
    if not samples:
        return "busy"
    last = samples[-1]
    start = next(
        (i for i in range(len(samples) - 1, -1, -1) if last.time_ns - samples[i].time_ns >= stall_after_s * 1e9), None
    )
    if start is None:
        return "busy"
    window = samples[start:]
    span_ns = last.time_ns - window[0].time_ns
    if last.cpu_ns - window[0].cpu_ns > IDLE_CPU_SHARE * span_ns or last.io_bytes != window[0].io_bytes:
        return "busy"
    stacks = [sample.stack_hash for sample in window if sample.stack_hash]
    if len(stacks) < 2 or len(set(stacks)) != 1:
        return "busy"
    return "stuck"
