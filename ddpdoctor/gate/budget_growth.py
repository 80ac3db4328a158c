"""A training step needs more than the baseline allows.

What it finds
    A figure of the budget that `ddpdoctor gate` keeps of a rehearsed script grew by more than the allowed share:
    collectives, bytes sent, synchronised backward passes, buffer broadcasts and host synchronisations a step, batches
    and samples of a rank a pass, or the bytes of the model's state. Each line that needs more than before is named.

Why it is bad
    What a step sends and waits for is paid in every step of every rank, and grows with the number of ranks. Times on
    the machines of a CI say little about it; these numbers are the same in every run.

Example
    for batch in loader:
        loss = train_step(batch)
        dist.all_reduce(loss)  # one more collective a step than the baseline has

Remedy
    Take the line out of the step, or do it once in many steps. Where the growth is wanted, accept it with
    `ddpdoctor gate --update`, and commit the baseline.

When it is wrong
    When the work of a step was made larger on purpose: a larger model, a larger data set.

References
    https://pytorch.org/docs/stable/notes/ddp.html
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddpdoctor.check import Check, LoadedCheck
from ddpdoctor.examination import Difference, Figure
from ddpdoctor.finding import Fact, Finding, Location, Severity
from ddpdoctor.gate.budget import amount

CHECK = Check(code="DDP901", name="budget-growth", severity={"rehearsal": Severity.ERROR})
LOADED = LoadedCheck(check=CHECK, documentation=__doc__ or "")


def findings(figures: Sequence[Figure], against: str, update: str) -> Iterator[Finding]:
    """Yield one finding for each line that brought a figure above what is allowed, with all that it brought.

    ``update`` is the command that accepts it; empty where there is none.
    """
    by_line: dict[str, list[tuple[Figure, Difference]]] = {}
    for figure in figures:
        if figure.change != "grown":
            continue
        risen = [one for one in figure.differences if one.now > one.before]
        for difference in risen[:1]:
            by_line.setdefault(difference.shown, []).append((figure, difference))
    for brought in by_line.values():
        yield _finding(brought, against, update)


def _finding(brought: Sequence[tuple[Figure, Difference]], against: str, update: str) -> Finding:
    place = next((one.location for _, one in brought if one.location is not None), None)
    clauses = [
        f"{figure.label}: {amount(figure, figure.now)} instead of {amount(figure, figure.before or 0)}"
        for figure, _ in brought
    ]
    facts = []
    for figure, _ in brought:
        text = f"{figure.label}: {amount(figure, figure.before or 0)} in {against}, {amount(figure, figure.now)} now"
        numbers = {f"{figure.metric}_before": figure.before or 0, f"{figure.metric}_now": figure.now}
        facts.append(Fact(text=text, basis="rehearsal", numbers=numbers, location=_first(figure)))
        facts += [_line(figure, one) for one in figure.differences]
    return CHECK.finding(
        f"{'; '.join(clauses)}, caused by {brought[0][1].shown}",
        basis="rehearsal",
        remedy="Take it out of the step" + (f", or accept it: `{update}`, and commit the baseline." if update else "."),
        locations=(place,) if place is not None else (),
        evidence=tuple(facts),
    )


def _first(figure: Figure) -> Location | None:
    return next((one.location for one in figure.differences if one.location is not None), None)


def _line(figure: Figure, difference: Difference) -> Fact:
    was, now = amount(figure, difference.before), amount(figure, difference.now)
    return Fact(
        text=f"{difference.shown}, {difference.what}: {was} → {now}", basis="rehearsal", location=difference.location
    )
