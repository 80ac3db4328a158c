"""A DistributedSampler is given a rank or a number of ranks that the job does not have.

What it finds
    DistributedSampler(rank=..., num_replicas=...) given the local rank, the constant 0, the number of GPUs of one node
    or a fixed number, in a job whose ranks come from a launcher; or a seed= that depends on the rank. The script is
    read as a job of two nodes. In a run: samplers for all ranks, several of which were given the same rank; and shards
    that overlap by more than their padding, as each rank shuffles by another seed, epoch or generator.

Why it is bad
    The sampler gives each process the shard of the rank that it is given. With the local rank the two nodes draw the
    same shards, with rank 0 all processes draw the same one: the rest of the data is never seen, and the loss looks
    fine. A number of replicas that is too small is rejected by the sampler on the higher ranks only, and the others
    wait.

Example
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=local_rank)

Remedy
    Omit both arguments: the sampler gets them from the process group. Or give dist.get_rank() and
    dist.get_world_size().

When it is wrong
    Where each node holds its own part of the data on its own disk; give the local rank and the local world size then.

References
    https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.checks.launch.wrong_sampler_rank.source import wrong_sampler_ranks
from ddpdoctor.finding import Fact, Finding, Refuted, Severity
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.queries.job_kind import is_single_node
from ddpdoctor.source.script.script import Script

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP517",
    name="wrong-sampler-rank",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ERROR),
    needs=frozenset({"loaders", "passes"}),
    subjects=("sampler",),
    triggers=("DistributedSampler",),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report samplers whose shards do not belong to the ranks that draw them."""
    projection = whole_projection(script)
    one_node = is_single_node(projection)
    for wrong in wrong_sampler_ranks(projection):
        sampler = wrong.sampler
        if wrong.is_mild and one_node:
            continue
        severity = Severity.WARNING if wrong.is_mild or wrong.may_agree else None
        yield CHECK.finding(
            "source",
            f"the sampler is given {wrong.given}",
            remedy=wrong.remedy,
            locations=(sampler.module.location(sampler.node),),
            evidence=(
                Fact(
                    text=wrong.effect,
                    basis="source",
                    location=sampler.module.location(sampler.node),
                    stack=sampler.chain,
                ),
            ),
            severity=Severity.ADVICE if wrong.on_two_nodes and one_node else severity,
        )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report samplers that leave the shards of some ranks to no one, and shards that overlap."""
    from ddpdoctor.checks.data.shared.sampler_ranks_run import overlapping_shards
    from ddpdoctor.checks.data.shared.sampler_ranks_run import wrong_sampler_ranks as wrong_ranks_in_run

    for shards in overlapping_shards(record):
        yield CHECK.finding(
            record.job.kind,
            shards.sentence,
            remedy=shards.remedy,
            locations=shards.locations,
            ranks=shards.loader.ranks,
            evidence=(
                Fact(
                    text=shards.cause,
                    basis=record.job.kind,
                    numbers={"samples_shared": shards.shared, "samples_left_out": shards.left_out},
                    location=shards.locations[0] if shards.locations else None,
                ),
            ),
        )

    for wrong in wrong_ranks_in_run(record):
        yield CHECK.finding(
            record.job.kind,
            wrong.sentence,
            remedy="Omit rank= and num_replicas=: the sampler gets them from the process group. Or give "
            "dist.get_rank() and "
            "dist.get_world_size().",
            locations=wrong.locations,
            ranks=wrong.loader.ranks,
            evidence=tuple(
                Fact(text=text, basis=record.job.kind, location=wrong.locations[0] if wrong.locations else None)
                for text in wrong.facts
            ),
        )
