"""The process group is never destroyed.

What it finds
    A script that calls init_process_group and in which nothing uses destroy_process_group. In a run: ranks that came
    to the end of the script without it.

Why it is bad
    At the end of the program NCCL's threads and sockets are torn down in no particular order: torch warns about leaked
    resources, and a rank that leaves early can make the others report an error or hang in their own exit. In notebooks
    and tests a second init_process_group fails.

Example
    dist.init_process_group("nccl")
    train()

Remedy
    Call dist.destroy_process_group() at the end of the function that each rank runs.

When it is wrong
    Where the program is meant to end by os._exit, or the group belongs to a library that destroys it.

References
    https://docs.pytorch.org/docs/stable/distributed.html#shutdown
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check, Script
from ddpdoctor.checks.launch.backend_mismatch import forgotten_groups
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.projection import whole_projection

CHECK = Check(
    code="DDP506",
    name="group-not-destroyed",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ADVICE),
    needs=frozenset({"ranks", "waits"}),
    subjects=("job",),
    triggers=("init_process_group",),
)
REMEDY = "Call dist.destroy_process_group() at the end of what each rank runs."


def in_source(script: Script) -> Iterator[Finding]:
    """Report the initialisation of a process group that nothing destroys."""
    for event in forgotten_groups(whole_projection(script)):
        yield CHECK.finding("this process group is never destroyed", remedy=REMEDY, locations=event.location)


in_run = CHECK.judged_by("checks.launch.environment_run", "judge_ends", REMEDY)
