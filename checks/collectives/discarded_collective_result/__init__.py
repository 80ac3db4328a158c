"""The result of a collective is discarded.

What it finds
    A collective that returns its result (Horovod's `allreduce`, functional collectives, those of
    `torch.distributed.nn`, Accelerate's `gather` and `reduce`) called as a statement on a variable that is used
    afterwards as if it had been changed in place.

Why it is bad
    The variable still holds this rank's own value. Nothing fails: gradients are not averaged, or rank 0's metric is
    reported as the job's.

Example
    hvd.allreduce(loss)                 # returns the average; loss stays local
    print(loss.item())

Remedy
    Assign the result (loss = hvd.allreduce(loss)), or call the in-place form (hvd.allreduce_, dist.all_reduce).

When it is wrong
    If the call only serves to synchronise the ranks.

References
    https://horovod.readthedocs.io/en/stable/api.html#module-horovod.torch
    https://docs.pytorch.org/docs/stable/distributed.html
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check
from ddpdoctor.checks.collectives.discarded_collective_result.source import discarded_results
from ddpdoctor.finding import Fact, Finding, Severity
from ddpdoctor.source.projection import project
from ddpdoctor.source.script.script import Script

CHECK = Check(
    code="DDP315",
    name="discarded-collective-result",
    severity={"source": Severity.ERROR},
    subjects=("collectives",),
    triggers=("reduce", "gather", "broadcast", "scatter", "to_all", "toall", "pad_across"),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report collectives whose result no one takes."""
    for discarded in discarded_results(project(script)):
        yield CHECK.finding(
            "source",
            f"{discarded.collective} returns its result and leaves `{discarded.name}` unchanged; the result is "
            "discarded",
            remedy=f"Assign it: {discarded.name} = {discarded.call}.",
            locations=(discarded.location,),
            evidence=(
                Fact(
                    text=f"`{discarded.name}` is used here, with this rank's own value",
                    basis="source",
                    location=discarded.used,
                ),
            ),
        )
