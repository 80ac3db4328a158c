"""A sum over the ranks is shown as if it were their mean.

What it finds
    A number that is all-reduced with SUM (the default), then printed or logged as a loss, an accuracy or a mean (by its
    own name or the text beside it), without any division, in the same function or in callers that receive it.
    Also two tensors that are both summed and then compared item by item, as predicted and true classes are.

Why it is bad
    The number grows with the number of ranks: the loss of 8 ranks looks eight times as bad as that of one, an accuracy
    goes above 100%, and runs of different sizes cannot be compared. Sums of the ranks' class numbers are not classes:
    whether they are equal says nothing about any sample.

Example
    dist.all_reduce(loss)
    print(f"loss {loss.item():.3f}")

Remedy
    Divide by dist.get_world_size(), or pass op=dist.ReduceOp.AVG (NCCL). With different numbers of samples per rank,
    reduce sum and count and divide them. Of classes, compare them on each rank, then sum how many are right.

When it is wrong
    If the sum is intended; a name such as total_loss indicates that.

References
    https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.ReduceOp
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check
from ddpdoctor.checks.collectives.sum_as_mean_source import compared_sums, shown_sums
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script.script import Script

CHECK = Check(
    code="DDP317",
    name="sum-as-mean",
    severity={"source": Severity.WARNING},
    subjects=("collectives",),
    triggers=("reduce",),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report means that are summed over the ranks and shown."""
    for found in shown_sums(whole_projection(script)):
        event = found.collective
        shown = found.module.location(found.shown)
        yield CHECK.finding(
            "source",
            f"`{found.name}` is the sum over all ranks when line {shown.line} shows it, world size times the mean",
            remedy="Divide by dist.get_world_size() after the reduction, or reduce with op=dist.ReduceOp.AVG.",
            locations=(event.location, shown),
            because=((f"`{found.name}` is shown here, undivided", shown),),
        )
    for event, compared in compared_sums(whole_projection(script)):
        place = event.module.location(compared)
        yield CHECK.finding(
            "source",
            f"`{event.module.excerpt(compared, 60)}` compares sums over the ranks, which are not labels",
            remedy="Compare on every rank, then all-reduce the number of samples that are right, and that of all.",
            locations=(event.location, place),
            because=(("both sides were summed over the ranks before", place),),
        )
