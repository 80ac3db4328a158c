"""A rank ran out of memory.

What it finds
    The exception of a rank that asked for more memory than its GPU, or its machine, had left; behind the lost
    connections and timeouts that the other ranks report.

Why it is bad
    The others wait for that rank in their next collective until the timeout, and what they print hides the cause.

Example
    batch = pad(samples)                # on one rank a sample of ten times the length

Remedy
    Where one rank alone runs out: look at its batch (longest sample, other processes on its GPU, tensors that only rank
    0 keeps). Where all do: smaller batches with accumulation, checkpointing of activations, mixed precision.

When it is wrong
    Never: the allocator reports it.

References
    https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check, RunRecord
from ddpdoctor.diagnosis.failures import named_failures
from ddpdoctor.diagnosis.wording import rank_list
from ddpdoctor.finding import Finding, Refuted, Severity

CHECK = Check(
    code="DDP702",
    name="rank-out-of-memory",
    stands_for="out-of-memory",
    severity=dict.fromkeys(("rehearsal", "run", "log"), Severity.ERROR),
    needs=frozenset({"ranks"}),
)


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the ranks that ran out of memory, one finding a line."""
    for failure in named_failures(record, CHECK.stands_for):
        everyone = len(failure.ranks) == len(record.ranks)
        yield CHECK.finding(
            f"{rank_list(failure.ranks)} ran out of memory" + ("" if everyone else "; the others fail because of it"),
            basis=record.job.kind,
            remedy="Use smaller batches with accumulation, activation checkpointing, or mixed precision."
            if everyone
            else "Look at what this rank alone holds: its longest sample, other processes on its GPU, tensors kept for "
            "logging.",
            locations=failure.location,
            ranks=failure.ranks,
            because=(f"{failure.type}: {failure.message}", failure.location),
        )
