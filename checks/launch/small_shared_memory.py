"""The shared memory of the machine or container is too small for the loader workers.

What it finds
    A worker of a DataLoader that died of a bus error, or torch's message that shared memory is insufficient. In a live
    run, before that: ranks that use a /dev/shm of which less than a tenth and less than 256 MiB is free.

Why it is bad
    Workers pass their batches through /dev/shm, which has 64 MB in a Docker container by default. A
    worker that cannot write there is killed in the middle of an epoch; the other ranks then wait for its rank.

Example
    docker run --gpus all image torchrun train.py       # 64 MB for all ranks' workers

Remedy
    Start the container with --ipc=host or a larger --shm-size (in Kubernetes: an emptyDir of medium Memory at
    /dev/shm), or use fewer workers and smaller batches.

When it is wrong
    Where the worker died of a bus error of its own, for instance in a memory-mapped file that was cut short.

References
    https://docs.pytorch.org/docs/stable/multiprocessing.html#sharing-strategies
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.finding import Finding, Refuted, Severity

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP507",
    name="small-shared-memory",
    stands_for="shared-memory",
    severity=dict.fromkeys(("rehearsal", "run", "log"), Severity.WARNING),
    needs=frozenset({"ranks"}),
)


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report ranks whose workers ran out of shared memory."""
    from ddpdoctor.diagnosis.failures import named_failures
    from ddpdoctor.diagnosis.wording import rank_list

    for failure in named_failures(record, CHECK.stands_for):
        yield CHECK.finding(
            record.job.kind,
            f"the loader workers of {rank_list(failure.ranks)} ran out of shared memory (/dev/shm)",
            remedy="Start the container with --ipc=host or a larger --shm-size, or use fewer workers.",
            locations=failure.location,
            ranks=failure.ranks,
            because=((f"{failure.type}: {failure.message}", failure.location),),
        )
    yield from _almost_full(record)


def _almost_full(record: RunRecord) -> Iterator[Finding]:
    from ddpdoctor.checks.launch.devices_run import full_shared_memory
    from ddpdoctor.diagnosis.wording import rank_list

    full = full_shared_memory(record)
    if not full:
        return
    least = min(full, key=lambda use: use.shared_memory_free_bytes)
    free, size = least.shared_memory_free_bytes >> 20, least.shared_memory_bytes >> 20
    yield CHECK.finding(
        record.job.kind,
        f"the shared memory (/dev/shm) of {rank_list(use.rank for use in full)} is almost full",
        remedy="Start the container with --ipc=host or a larger --shm-size, or use fewer workers.",
        ranks=tuple(use.rank for use in full),
        because=((f"{free:,} MiB of {size:,} MiB were free", None),),
    )
