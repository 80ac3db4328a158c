"""A rank decides from its own data, files or clock whether to take part in a collective.

What it finds
    A condition that each rank decides from something local (its batch, a loss that was not reduced, the clock, files
    on its machine, unseeded random numbers, a number drawn from the store) with a collective, or a forward or backward
    of the DDP model, that only one of its outcomes runs: a skipped batch, early stopping, a time limit, a loop over the
    keys of a loss dict. Or collectives for each string of a set. As advice: leaving because its own loss is not finite.
    In a run: ranks that diverge at lines which each had run before, and batches that only some ranks trained on.

Why it is bad
    The ranks agree until the data makes them disagree, hours into the run. Then one skips a collective in which the
    others wait: the job hangs, or averages gradients of different steps from then on.

Example
    for batch in loader:
        if batch["boxes"].numel() == 0:
            continue                        # this rank alone skips backward
        model(batch).backward()

Remedy
    Decide together: all-reduce the condition (MAX for "any rank", MIN for "all ranks") and branch on the result; or run
    the backward on every rank and multiply the loss by 0 where it should not count.

When it is wrong
    If the ranks' data is identical by construction: all read one shared file, or draw the same samples.

References
    https://docs.pytorch.org/docs/stable/notes/ddp.html
    https://github.com/open-mmlab/mmdetection/issues/6495
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.checks.collectives.data_dependent_divergence.source import WORDS, OwnParting, own_partings
from ddpdoctor.finding import Fact, Finding, Refuted, Severity
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script.script import Script

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP302",
    name="data-dependent-divergence",
    stands_for="data-branch",
    severity={"source": Severity.WARNING, "rehearsal": Severity.ERROR, "run": Severity.ERROR},
    needs=frozenset({"ranks", "collectives", "forwards", "passes"}),
    subjects=("collectives",),
    triggers=("distributed", "Distributed", "ccelerat", "horovod", "ightning"),
)
_TOGETHER = (
    "All-reduce or broadcast the condition and branch on the result, so that all ranks take the same path; or "
    "run the collective on every rank and ignore its result where it should not count."
)
_REMEDIES = {
    "raise": "All-reduce the check first, so that all ranks leave together, with a message.",
    "loop": "Iterate over something that is the same on every rank, such as a sorted, fixed list of names.",
    **dict.fromkeys(("files", "polled"), "Let rank 0 look and broadcast the result, then branch on it."),
    "guard": "Let every rank read it, or broadcast it from the rank that did.",
    "store": "Give every rank the same number of pieces, or stop together: all-reduce whether any rank has run out.",
}


def in_source(script: Script) -> Iterator[Finding]:
    """Report conditions of a rank's own that decide over collectives."""
    decisions: list[list[OwnParting]] = []
    for parting in own_partings(whole_projection(script)):
        same = next((found for found in decisions if found[0].is_one_with(parting)), None)
        if same is None:
            decisions.append([parting])
        else:
            same.append(parting)
    for parting, *others in decisions:
        also = [
            Fact(text=f"`{other.condition}` depends on it as well", basis="source", location=other.location)
            for other in others
        ]
        yield CHECK.finding(
            "source",
            _title(parting),
            remedy=_remedy(parting),
            locations=(parting.location, parting.collective_location),
            evidence=(*_evidence(parting), *also),
            severity=Severity.ADVICE if parting.how == "raise" or parting.of_inputs else None,
        )


def _evidence(parting: OwnParting) -> tuple[Fact, ...]:
    asked = f"`{parting.condition}` {'is' if parting.kind == 'order' else 'depends on'} {WORDS[parting.kind]}"
    needed = f"every rank must reach this {parting.collective} together"
    first = Fact(text=asked, basis="source", location=parting.location, stack=parting.chain)
    return first, Fact(text=needed, basis="source", location=parting.collective_location)


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report ranks that diverge where they continued alike before, and batches that some ranks passed over."""
    from ddpdoctor.diagnosis.divergence import describe
    from ddpdoctor.diagnosis.divergence.divergence import find_divergence
    from ddpdoctor.diagnosis.divergence_kind import divergence_of, skip_behind
    from ddpdoctor.diagnosis.training.skipped_batches import skipped_batches

    basis = record.job.kind
    divergence = divergence_of(record, CHECK.stands_for)
    if divergence is not None:
        skip = skip_behind(divergence, record)
        title, ranks, places = describe.title(divergence), describe.ranks(divergence), describe.locations(divergence)
        if skip is not None:
            title, ranks = f"{skip.sentence}; then {title}", skip.named
            places = tuple(dict.fromkeys((*skip.locations, *places)))
        facts = describe.facts(divergence, basis)
        yield CHECK.finding(basis, title, remedy=_TOGETHER, locations=places, ranks=ranks, evidence=facts)
    elif find_divergence(record) is None and (skip := next(skipped_batches(record), None)) is not None:
        luck = f"{skip.sentence}, and nothing hung only because other ranks skipped as many"
        yield CHECK.finding(
            basis, luck, remedy=_TOGETHER, locations=skip.locations, ranks=skip.named, severity=Severity.WARNING
        )


def _title(parting: OwnParting) -> str:
    line = f"{parting.collective} at line {parting.collective_location.line}"
    if parting.how == "raise":
        return f"one rank can end the job alone: `{parting.condition}` depends on {WORDS[parting.kind]}"
    if parting.kind == "order":
        return f"ranks run {line} in different orders: `{parting.condition}` is {WORDS[parting.kind]}"
    if parting.how == "loop":
        return f"ranks may run {line} a different number of times: {WORDS[parting.kind]} decides how often"
    return f"`{parting.condition}` depends on {WORDS[parting.kind]} and decides whether this rank runs {line}"


def _remedy(parting: OwnParting) -> str:
    own = _REMEDIES.get(parting.kind) if parting.kind == "guard" else None
    return own or _REMEDIES.get(parting.how) or _REMEDIES.get(parting.kind, _TOGETHER)
