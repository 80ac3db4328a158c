"""The ranks compute another gradient than one process would on the same samples.

What it finds
    A rehearsal in which the optimizers of the ranks get other gradients than those of one process that is given the
    samples of all ranks: a multiple of them, for all parameters or for some; other shares of the ranks' samples; a loss
    that one rank computes otherwise; gradients that are cut at a gather, clipped or stepped with before they are
    averaged; shards that each rank scales by a number of its own. In the source: a loss that is divided by a count
    which was added up over all ranks, and that no number of ranks multiplies.

Why it is bad
    DDP promises that training on N ranks is training on a batch N times as large. Where the gradient is another one,
    nothing fails: the learning rate is off by a factor, or what is minimised is not the loss that the script names, and
    results change with the number of ranks.

Example
    loss = total / tokens_of_this_rank      # the mean of means: a rank with few tokens counts as much as any other
    loss.backward()

Remedy
    Give DDP on each rank N times its part of the loss of the whole batch, which is the mean of the rank where all have
    as many samples: DDP averages over the ranks.

When it is wrong
    Where the difference is meant, as of a learning rate that is scaled elsewhere. What the comparison cannot explain,
    and what differs by design (negatives of the own rank, statistics of batch norms), is not reported.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check, RunRecord, Script
from ddpdoctor.checks.gradients.divided_losses_source import divided_losses
from ddpdoctor.equivalence_section import COUNTED_TWICE
from ddpdoctor.finding import Finding, Location, Refuted, Severity
from ddpdoctor.source.projection import whole_projection

CHECK = Check(
    code="DDP223",
    name="unlike-one-process",
    severity=dict.fromkeys(("source", "rehearsal"), Severity.WARNING),
    needs=frozenset({"equivalence"}),
    subjects=("wrap", "loss"),
    triggers=("reduce", "gather"),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report losses that are divided by a count of all ranks before DDP averages their gradients."""
    for divided in divided_losses(whole_projection(script)):
        place, count = divided.location, divided.module.excerpt(divided.divisor, 40)
        yield CHECK.finding(
            f"the loss is divided by `{count}`, a count of all ranks, and DDP averages over the ranks on top",
            remedy=COUNTED_TWICE,
            locations=(place, divided.reduction.location),
            because=(
                ("the count is added up over the ranks here", divided.reduction.location),
                ("this backward averages the gradients, which are then 1/N of those of one process", divided.backward),
            ),
        )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report how the gradients differ."""
    from ddpdoctor.diagnosis.training.equivalence_words import difference, remedy
    from ddpdoctor.diagnosis.wording import site_location

    backwards = (site_location(record.site(one.site)) for one in record.backwards if one.rank == 0)
    backward = next((place for place in backwards if place is not None), None)
    for section in record.equivalence:
        if section.status == "equal":
            for _, file, line in section.places:
                yield Refuted(location=Location(file=file, line=line), reason="the gradients are those of one process")
        if section.status != "differs":
            continue
        places = tuple(Location(file=file, line=line) for _, file, line in section.places if file)
        text = (
            f"{section.equal} of {section.parameters} parameters have the gradient of "
            f"{f'`{section.against}`' if section.against else 'one process'} in "
            f"{section.steps} optimizer steps; the others differ by up to {section.within:.0%} of it"
        )
        numbers = {"equal": section.equal, "parameters": section.parameters, "within": section.within}
        yield CHECK.finding(
            difference(section),
            basis="rehearsal",
            remedy=remedy(section),
            ranks=section.at,
            locations=places or ((backward,) if backward is not None else ()),
            because=(text, None, numbers),
        )
