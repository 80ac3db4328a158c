"""A rehearsal no longer reaches code that it reached when the baseline was written.

What it finds
    Statements that stand in the script as before and that some rank ran in the rehearsal of the baseline, and none runs
    in this one. What was deleted or rewritten is not meant.

Why it is bad
    A rehearsal vouches only for what it came to: an evaluation, a checkpoint or an epoch end that is no longer reached
    may hang for all that the gate knows.

Example
    if epoch and epoch % 5 == 0:  # was: every epoch; a rehearsal makes a few epochs
        evaluate(model)

Remedy
    Give the script arguments with which it comes there (`ddpdoctor gate train.py -- --eval-every 1`), or more
    `--batches`. Where it is meant, accept it with `ddpdoctor gate --update`.

When it is wrong
    Where the code is reached by chance only, such as by random numbers or by the time that something takes.

References
    https://docs.python.org/3/library/trace.html
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ddpdoctor.check import Check, LoadedCheck
from ddpdoctor.finding import Fact, Finding, Severity
from ddpdoctor.findings.locations import shown_path
from ddpdoctor.gate.reach import Lost

CHECK = Check(code="DDP902", name="lost-reach", severity={"rehearsal": Severity.ERROR})
LOADED = LoadedCheck(check=CHECK, documentation=__doc__ or "")


def findings(lost: Iterable[Lost], against: str, root: str, update: str) -> Iterator[Finding]:
    """Yield one finding for each function that lost lines; ``update`` is the command that accepts them, if any."""
    for one in lost:
        place = f"{shown_path(one.location.file, root)}:{one.location.line}"
        where = f" in {one.function}" if one.function else ""
        lines = "a statement" if one.count == 1 else f"{one.count} statements"
        yield CHECK.finding(
            "rehearsal",
            f"the rehearsal no longer reaches {lines}{where}, from {place} on",
            remedy="Use script arguments or `--batches` with which it gets there"
            + (f", or accept it: `{update}`." if update else "."),
            locations=(one.location,),
            evidence=(
                Fact(text=f"{against} has {lines}{where} as reached", basis="rehearsal", numbers={"lines": one.count}),
            ),
        )
