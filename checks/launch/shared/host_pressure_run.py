"""Ranks that get too little of their machine: of its cores, or of its shared memory."""

from __future__ import annotations

import msgspec

from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.measured import HostUse

WATCHED_AT_LEAST_NS = 20_000_000_000
WAITED_SHARE = 0.2
"""Share of the time in which a main thread could run and no core was free."""
THREADS_PER_CORE = 1.5
FULL_BELOW_SHARE = 0.1
FULL_BELOW_BYTES = 256 << 20


class CorePressure(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks of one machine that wait for cores which they take from each other."""

    ranks: tuple[int, ...]
    waited_share: float
    """Of the time, the mean of these ranks."""
    busy_threads: int
    cores: int


def core_pressure(record: RunRecord) -> CorePressure | None:
    """Return the ranks whose main threads wait for a core, where the job itself runs more threads than there are cores.

    What other programs do to the cores is not the job's, and neither is a short moment.
    """
    watched = [use for use in record.host_uses if use.watched_ns >= WATCHED_AT_LEAST_NS and use.cores]
    waiting = [use for use in watched if use.main_waited_ns >= WAITED_SHARE * use.watched_ns]
    busy, cores = sum(use.busy_threads for use in watched), max((use.cores for use in watched), default=0)
    if not waiting or busy < THREADS_PER_CORE * cores:
        return None
    return CorePressure(
        ranks=tuple(use.rank for use in waiting),
        waited_share=sum(use.main_waited_ns / use.watched_ns for use in waiting) / len(waiting),
        busy_threads=busy,
        cores=cores,
    )


def full_shared_memory(record: RunRecord) -> tuple[HostUse, ...]:
    """Return the ranks that hold something in a /dev/shm that is, or was, almost full."""
    return tuple(
        use
        for use in record.host_uses
        if use.maps_shared_memory
        and use.shared_memory_free_bytes < min(FULL_BELOW_BYTES, FULL_BELOW_SHARE * use.shared_memory_bytes)
    )
