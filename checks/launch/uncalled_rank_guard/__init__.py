"""A condition tests a rank function instead of calling it.

What it finds
    The name of a function such as is_main_process, dist.is_initialized or get_rank in a condition, without the
    parentheses that would call it. The function is one of the project, one of torch.distributed, or one that the same
    project calls elsewhere.

Why it is bad
    A function is always true, and never equal to 0. `if is_main_process:` selects every rank, so all of them save,
    print and log; `if get_rank == 0:` selects none, so nothing is ever saved. Python does not warn.

Example
    if is_main_process:
        torch.save(model.state_dict(), "checkpoint.pt")

Remedy
    Call it: `if is_main_process():`.

When it is wrong
    If the test intentionally checks whether a hook was set. Names that are assigned anywhere else in the module are
    excluded for that reason.

References
    https://docs.python.org/3/library/stdtypes.html#truth-value-testing
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check
from ddpdoctor.checks.launch.uncalled_rank_guard.fix import call_guard
from ddpdoctor.checks.launch.uncalled_rank_guard.source import uncalled_guards
from ddpdoctor.finding import Fact, Finding, Severity
from ddpdoctor.fix.edits import Fix
from ddpdoctor.source.script.script import Script

CHECK = Check(
    code="DDP516",
    name="uncalled-rank-guard",
    severity={"source": Severity.ERROR},
    triggers=("rank", "RANK", "is_", "main", "master", "primary", "distributed"),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report names of functions about ranks that are tested without being called."""
    for guard in uncalled_guards(script):
        outcome = "never equal to a number" if guard.compared else "always true"
        facts: tuple[Fact, ...] = ()
        if guard.definition is not None:
            facts = (Fact(text="the function is defined here", basis="source", location=guard.definition),)
        yield CHECK.finding(
            "source",
            f"{guard.text} is a function that is not called here, so the condition is {outcome}",
            remedy=f"Call it: {guard.text}().",
            locations=(guard.location,),
            evidence=facts,
            severity=None if guard.of_ranks else Severity.ADVICE,
        )


def fixes(script: Script, finding: Finding) -> Iterator[Fix]:
    """Offer to call the function."""
    yield from call_guard(script, finding)
