"""Samples what the ranks' process trees do, so that a rank that is busy can be told from one that is stuck."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from ddpdoctor.diagnosis.liveness import Sample, at_rest, judge_liveness
from ddpdoctor.record.reader import Beating

if TYPE_CHECKING:
    import psutil

SAMPLE_EVERY_S = 0.5


class LivenessSampler:
    """Keeps the last seconds of samples of every rank's process."""

    def __init__(self, stall_after_s: float, outer_pid: Callable[[int], int | None] = lambda pid: pid) -> None:
        """``outer_pid`` gives the number out here of a process that knows itself by another one."""
        self._stall_after_s = stall_after_s
        self._outer_pid = outer_pid
        self._samples: dict[int, deque[Sample]] = {}
        self._sampled_s = 0.0

    def look(self, rings: Mapping[int, Beating]) -> frozenset[int]:
        """Take a sample when one is due; the processes that are stuck."""
        now_s = time.monotonic()
        if now_s - self._sampled_s >= SAMPLE_EVERY_S:
            self._sampled_s = now_s
            for pid, ring in rings.items():
                self._take(pid, ring)
        return frozenset(
            pid
            for pid, samples in self._samples.items()
            if judge_liveness(tuple(samples), self._stall_after_s) == "stuck"
        )

    def at_rest(self, pids: Iterable[int]) -> bool:
        """Tell whether none of the processes has done anything for the stall time but ask for something and sleep."""
        return all(at_rest(tuple(self._samples.get(pid, ())), self._stall_after_s) for pid in pids)

    def _take(self, pid: int, ring: Beating) -> None:
        import psutil

        outer = self._outer_pid(pid)
        if outer is None:
            self._samples.pop(pid, None)
            return
        try:
            beat = ring.heartbeat()
            cpu_s, io_bytes = _usage(psutil.Process(outer))
            if ring.heartbeat().own_bytes != beat.own_bytes:
                beat = ring.heartbeat()
                cpu_s, io_bytes = _usage(psutil.Process(outer))
        except (psutil.Error, AttributeError, OSError):
            self._samples.pop(pid, None)
            return
        samples = self._samples.setdefault(pid, deque(maxlen=int(4 * self._stall_after_s / SAMPLE_EVERY_S) + 4))
        samples.append(
            Sample(
                time_ns=time.monotonic_ns(),
                cpu_ns=int(cpu_s * 1e9),
                io_bytes=io_bytes - beat.own_bytes,
                stack_hash=f"{beat.stack_hash:x}",
            )
        )


def _usage(process: psutil.Process) -> tuple[float, int]:
    """Seconds of CPU time and bytes read and written of a process and all its children."""
    cpu_s, io_bytes = 0.0, 0
    for member in (process, *process.children(recursive=True)):
        times = member.cpu_times()
        cpu_s += times.user + times.system
        counters = member.io_counters()
        io_bytes += counters.read_chars + counters.write_chars
    return cpu_s, io_bytes
