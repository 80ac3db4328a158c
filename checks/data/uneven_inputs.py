"""Ranks get different numbers of batches in one training pass.

What it finds
    A training pass whose number of batches differs between the ranks, outside a `join()` context. In the source: a
    training loop over data that each rank takes for itself by arithmetic with its rank (`files[rank::world_size]`,
    `range(rank, len(data), world_size)`, `islice(stream, rank, None, world_size)`, `array_split(...)[rank]`, a slice
    of which the last rank takes the rest), where nothing makes the parts equal. In a run: the lengths.

Why it is bad
    Every backward of a DDP model waits for all ranks. A rank with one batch more waits in its last step for ranks that
    have moved on: the job hangs at the end of the epoch, or pairs gradients with collectives that are not theirs. One
    sample more is a batch more when it begins a new batch: it happens with one size of the data set and not with the
    next.

Example
    part = Subset(dataset, range(rank, len(dataset), world_size))
    loader = DataLoader(part, batch_size=32)

Remedy
    Give every rank the same number of batches: DistributedSampler pads the parts, and DistributedSampler(...,
    drop_last=True) cuts them. `drop_last=True` of the DataLoader does not: it can turn one sample more into one batch
    more. Data that cannot be made even is trained on inside `with model.join():`.

When it is wrong
    Where the data is known to divide evenly by the number of ranks, whatever its size, and in loops bounded by a
    number of steps that start the loader anew when it is exhausted. Loops that the script leaves by itself, endless
    data, and parts that are padded or cut to one length are recognised. A rehearsal refutes a suspicion of the source
    where the samples divide evenly by 2, 4 and 8 ranks.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html#torch.nn.parallel.DistributedDataParallel.join
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.finding import Fact, Finding, Refuted, Severity
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script.script import Script

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP103",
    name="uneven-inputs",
    stands_for="uneven-passes",
    severity={"source": Severity.WARNING, "rehearsal": Severity.ERROR, "run": Severity.ERROR},
    needs=frozenset({"loaders", "passes", "wraps"}),
    subjects=("training-loader",),
    triggers=("DistributedDataParallel", "ccelerat", "Fabric", "auto_model", "reduce"),
)
_EVEN = (
    "Give every rank the same number of batches: DistributedSampler pads the parts, or with drop_last=True cuts them"
)
_REMEDY = f"{_EVEN}; or run the loop inside `with model.join():`."


def in_source(script: Script) -> Iterator[Finding]:
    """Report training loops over parts of the data that need not be equal, at the loader or the division."""
    from ddpdoctor.checks.data.uneven_inputs_source import uneven_feeds

    for feed in uneven_feeds(whole_projection(script)):
        part, loader = feed.part, feed.loader
        divided = part.location
        yield CHECK.finding(
            "source",
            "the data of this training loop is divided by rank in parts that may differ in length: a rank with one "
            "batch more waits for the others in its last step",
            remedy=f"{_EVEN}." if feed.by_hand else _REMEDY,
            locations=divided if loader is None else loader.location,
            because=(
                (feed.division, divided),
                (
                    "the gradients of this backward are averaged over all ranks, once for each batch"
                    if feed.by_hand
                    else "this backward of a DDP model waits for all ranks, once for each batch",
                    feed.backward.location,
                ),
            ),
        )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the first uneven pass of each loader, with the hang that it caused; refute where samples divide evenly."""
    from ddpdoctor.diagnosis.divergence import describe
    from ddpdoctor.diagnosis.divergence_kind import divergence_of
    from ddpdoctor.diagnosis.training.pass_lengths import even_divisions, uneven_passes
    from ddpdoctor.diagnosis.wording import count

    divergence = divergence_of(record, CHECK.stands_for)
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
        hang = () if divergence is None else describe.facts(divergence, basis)
        divergence, consequence = None, f"; then {describe.title(divergence)}" if divergence is not None else ""
        yield CHECK.finding(
            basis,
            uneven.sentence + consequence,
            remedy=_REMEDY,
            locations=uneven.location,
            ranks=tuple(rank for rank, _ in uneven.lengths),
            evidence=lengths + hang,
        )
    for location, samples in even_divisions(record):
        yield Refuted(
            location=location,
            reason=f"the ranks' {count(samples, 'sample', 'samples')} divide evenly by 2, 4 and 8 ranks, and every "
            "rank got the same number",
        )
