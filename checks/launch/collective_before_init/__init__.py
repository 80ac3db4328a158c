"""A collective is called before init_process_group.

What it finds
    A collective, or the construction of DistributedDataParallel, that the script certainly reaches before the call of
    init_process_group that creates its group.

Why it is bad
    It raises "Default process group has not been initialized" on every rank, and the job ends before it began. Often
    the collective was meant to exchange the address that the group needs: only the launcher or the environment can
    provide it.

Example
    dist.broadcast(address, src=0)
    dist.init_process_group("nccl", init_method=f"tcp://{decode(address)}:29500")

Remedy
    Call init_process_group first. Let torchrun provide MASTER_ADDR and MASTER_PORT, or read them from the environment.

When it is wrong
    Where something that was not read makes the group before.

References
    https://docs.pytorch.org/docs/stable/distributed.html#initialization
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check
from ddpdoctor.checks.launch.collective_before_init.source import early_calls
from ddpdoctor.finding import Fact, Finding, Severity
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script.script import Script

CHECK = Check(
    code="DDP518",
    name="collective-before-init",
    severity={"source": Severity.ERROR},
    subjects=("job",),
    triggers=("init_process_group",),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report the first call that needs a process group and comes before it."""
    for early in early_calls(whole_projection(script)):
        event, later = early.event, early.initialisation
        what = "DistributedDataParallel is built" if event.kind == "wrap" else f"{event.name} is called"
        yield CHECK.finding(
            "source",
            f"{what} before init_process_group has created a process group",
            remedy="Call init_process_group first; torchrun gives every rank the address that it needs.",
            locations=(event.module.location(event.node),),
            evidence=(
                Fact(text="the group is made here", basis="source", location=later.module.location(later.node)),
                Fact(
                    text="this call chain leads to it before",
                    basis="source",
                    location=event.module.location(event.node),
                    stack=event.chain,
                ),
            ),
        )
