"""A CPU tensor is passed to an NCCL collective.

What it finds
    A collective of a process group that has NCCL only, on a tensor which was made without a device in the same function
    and never moved.

Why it is bad
    NCCL reads and writes GPU memory only. The call fails with "No backend type associated with device type cpu" (older
    versions: "Tensors must be CUDA and dense"), often at the end of an epoch, when a metric is averaged for the first
    time.

Example
    dist.init_process_group("nccl")
    total = torch.tensor([loss_sum, count])
    dist.all_reduce(total)

Remedy
    Make the tensor on the rank's GPU (`device=device`), or omit the backend of init_process_group: torch then has gloo
    for CPU tensors besides NCCL.

When it is wrong
    Where the default device was changed outside of what was read.

References
    https://docs.pytorch.org/docs/stable/distributed.html#backends
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check, RunRecord, Script
from ddpdoctor.checks.launch.backend_mismatch import cpu_tensors
from ddpdoctor.finding import Finding, Refuted, Severity, grouped
from ddpdoctor.source.projection import whole_projection

CHECK = Check(
    code="DDP515",
    name="cpu-tensor-with-nccl",
    stands_for="cpu-tensor",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ERROR),
    needs=frozenset({"ranks"}),
    subjects=("collectives",),
    triggers=("nccl", "NCCL"),
)
REMEDY = "Make the tensor on the rank's GPU with device=, or move it there before the call."


def in_source(script: Script) -> Iterator[Finding]:
    """Report CPU tensors in collectives of an NCCL group, one finding for a function: it has one device in mind."""
    tensors = cpu_tensors(whole_projection(script))
    for found in grouped(tensors, lambda one: (str(one[0].module.path), one[0].function)).values():
        (event, tensor, _), *others = found
        more = f" (and {len(others)} more in this function)" if others else ""
        yield CHECK.finding(
            f"{event.name} gets {tensor}, a CPU tensor, and the process group is NCCL's{more}",
            remedy=REMEDY,
            locations=tuple(event.location for event, _, _ in found),
            because=tuple((f"{tensor} is made here, without a device", made) for _, tensor, made in found),
        )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report calls that NCCL refused because of a CPU tensor."""
    from ddpdoctor.diagnosis.failures import named_failures
    from ddpdoctor.diagnosis.wording import rank_list

    if record.job.backend and "nccl" not in record.job.backend:
        return
    for failure in named_failures(record, CHECK.stands_for):
        yield CHECK.finding(
            f"{rank_list(failure.ranks)} gave a CPU tensor to a process group that has NCCL only",
            basis=record.job.kind,
            remedy=REMEDY,
            locations=failure.location,
            ranks=failure.ranks,
            because=(f"{failure.type}: {failure.message}", failure.location),
        )
