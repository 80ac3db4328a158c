"""Ranks get different numbers of batches in one training pass.

What it finds
    A training pass whose number of batches differs between the ranks, outside a `join()` context.

Why it is bad
    Every backward of a DDP model waits for all ranks. A rank with one batch more waits in its last step for ranks that
    have gone on to something else: the job hangs at the end of the epoch, or pairs gradients with collectives that are
    not theirs.

Example
    part = Subset(dataset, range(rank, len(dataset), world_size))
    loader = DataLoader(part, batch_size=32)

Remedy
    Give every rank the same number of batches (DistributedSampler pads, drop_last=True cuts), or train inside
    `with model.join():`.

When it is wrong
    Where the loop is bounded by a number of steps and starts the loader anew when it is exhausted.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html#torch.nn.parallel.DistributedDataParallel.join
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.finding import Fact, Finding, Refuted, Severity

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP103",
    name="uneven-inputs",
    severity={"source": Severity.WARNING, "rehearsal": Severity.ERROR, "run": Severity.ERROR},
    needs=frozenset({"loaders", "passes", "wraps"}),
)


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the first uneven pass of each loader, with the hang that it caused if there was one."""
    from ddpdoctor.diagnosis import account
    from ddpdoctor.diagnosis.classify import divergence_with_code
    from ddpdoctor.diagnosis.lengths import uneven_passes
    from ddpdoctor.diagnosis.wording import count

    divergence = divergence_with_code(record, CHECK.code)
    for uneven in uneven_passes(record, one_left=divergence is not None):
        basis = record.job.kind
        lengths = tuple(
            Fact(
                text=f"rank {rank} has {count(length, 'batch', 'batches')} in pass {uneven.ordinal} of this loader",
                basis=basis,
                numbers={"batches": length},
                rank=rank,
                location=uneven.location,
            )
            for rank, length in uneven.lengths[:8]
        )
        hang = () if divergence is None else account.facts(divergence, basis)
        divergence, consequence = None, f"; then {account.title(divergence)}" if divergence is not None else ""
        yield CHECK.finding(
            basis,
            uneven.sentence + consequence,
            remedy="Give every rank the same number of batches: DistributedSampler pads the shards, drop_last=True "
            "cuts them; or run the loop inside `with model.join():`.",
            locations=() if uneven.location is None else (uneven.location,),
            ranks=tuple(rank for rank, _ in uneven.lengths),
            evidence=lengths + hang,
        )
