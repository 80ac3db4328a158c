"""The loss is all-reduced before backward.

What it finds
    An in-place `all_reduce` or `reduce` of a loss on which `backward` is called afterwards.

Why it is bad
    The collective changes the value but not the graph behind it: autograd is not aware of it. The gradients are those
    of the local loss at best; where a later operation needs the old value, backward fails. DDP averages the gradients
    in backward anyway.

Example
    loss = criterion(model(x), y)
    dist.all_reduce(loss)
    loss.backward()

Remedy
    Call backward on the local loss. For the log, reduce a copy afterwards: dist.all_reduce(loss.detach().clone()).

When it is wrong
    Where the collective is one that autograd knows, under the same name (torch.distributed.nn returns its result).

References
    https://docs.pytorch.org/docs/stable/distributed.html
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check, RunRecord, Script
from ddpdoctor.checks.collectives.sum_as_mean import reduced_losses
from ddpdoctor.finding import Finding, Refuted, Severity
from ddpdoctor.source.projection import whole_projection

CHECK = Check(
    code="DDP316",
    name="reduce-before-backward",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ERROR),
    needs=frozenset({"reduced_losses"}),
    subjects=("collectives", "loss"),
    triggers=("reduce",),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report losses that are reduced in place and then differentiated."""
    yield from CHECK.suspected(reduced_losses(whole_projection(script)))


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report tensors that a collective changed in place and that a backward then came through."""
    from ddpdoctor.diagnosis.wording import place, rank_list, site_location, verb

    by_place: dict[tuple[int, int], set[int]] = {}
    for reduced in record.reduced_losses:
        by_place.setdefault((reduced.site, reduced.backward_site), set()).add(reduced.rank)
    for (number, backward_number), ranks in by_place.items():
        site, backward = record.site(number), record.site(backward_number)
        places = [location for location in map(site_location, (site, backward)) if location is not None]
        yield CHECK.finding(
            f"the loss is changed in place by the collective at {place(site.innermost)} before its backward at "
            f"{place(backward.innermost)}, which is not aware of it",
            basis=record.job.kind,
            remedy="Call backward on the local loss; DDP averages the gradients. Reduce a detached copy for the log.",
            locations=tuple(places),
            because=(
                f"{rank_list(ranks)} {verb(ranks, 'starts', 'start')} the backward from the reduced tensor",
                places[-1] if places else None,
            ),
        )
