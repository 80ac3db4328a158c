"""A rank decides by its own data, files or clock whether it joins in.

What it finds
    A condition that each rank decides by something of its own (its batch, a loss that was not reduced, the clock, files
    on its machine, unseeded random numbers) with a collective, or a forward or backward of the DDP model, that only one
    of its outcomes runs: a skipped batch, early stopping, a time limit, a loop over the keys of a loss dict. As advice:
    leaving with an error because the own loss is not finite.

Why it is bad
    The ranks agree until the data makes them disagree, hours into the run. Then one of them skips a collective that the
    others wait in: the job hangs, or from that step on averages gradients of different steps without a word.

Example
    for batch in loader:
        if batch["boxes"].numel() == 0:
            continue                        # this rank alone skips backward
        loss = model(batch)
        loss.backward()

Remedy
    Decide together: all-reduce the condition (MAX for "any rank", MIN for "all ranks") and branch on the result; or run
    the backward on every rank and multiply the loss by 0 where it should not count.

When it is wrong
    Where the ranks' data is alike by construction: every rank reads the same file of one shared file system, or
    evaluates the same samples with a loader that the source does not show.

References
    https://docs.pytorch.org/docs/stable/notes/ddp.html
    https://github.com/open-mmlab/mmdetection/issues/6495
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check
from ddpdoctor.finding import Fact, Finding, Severity
from ddpdoctor.source.own_divergence import WORDS, OwnParting, own_partings
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script import Script

CHECK = Check(code="DDP302", name="data-dependent-divergence", severity={"source": Severity.WARNING})


def in_source(script: Script) -> Iterator[Finding]:
    """Report conditions of a rank's own that decide over collectives."""
    for parting in own_partings(whole_projection(script)):
        yield CHECK.finding(
            "source",
            _title(parting),
            remedy=_remedy(parting),
            locations=(parting.location, parting.collective_location),
            evidence=(
                Fact(
                    text=f"`{parting.condition}` asks {WORDS[parting.kind]}",
                    basis="source",
                    location=parting.location,
                    stack=parting.chain,
                ),
                Fact(
                    text=f"every rank has to come to this {parting.collective} together",
                    basis="source",
                    location=parting.collective_location,
                ),
            ),
            severity=Severity.ADVICE if parting.how == "raise" else None,
        )


def _title(parting: OwnParting) -> str:
    line = f"{parting.collective} at line {parting.collective_location.line}"
    if parting.how == "raise":
        return f"one rank can end the job alone: `{parting.condition}` asks {WORDS[parting.kind]}"
    if parting.how == "loop":
        return f"ranks may run {line} a different number of times: {WORDS[parting.kind]} decides how often"
    return f"`{parting.condition}` asks {WORDS[parting.kind]} and decides whether this rank runs {line}"


def _remedy(parting: OwnParting) -> str:
    if parting.how == "raise":
        return (
            "All-reduce the check first, so that all ranks leave together with a message; alone, the rank leaves the "
            "others waiting until the launcher stops them."
        )
    if parting.how == "loop":
        return "Go over something that is the same on every rank, such as a sorted, fixed list of names."
    if parting.kind == "files":
        return "Let rank 0 look and broadcast the answer, then branch on it."
    return (
        "All-reduce or broadcast the condition and branch on the result, so that all ranks take the same way; or run "
        "the collective on every rank and let its result count for nothing."
    )
