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

from ddpdoctor.check import Check, Script
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.events import Event, events_in
from ddpdoctor.source.interpreter.values import ALL_RANKS
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.job_kind import joins_by_framework
from ddpdoctor.source.vocabulary import COLLECTIVES

CHECK = Check(
    code="DDP518",
    name="collective-before-init",
    severity={"source": Severity.ERROR},
    subjects=("job",),
    triggers=("init_process_group",),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report the first call that needs a process group and comes before it."""
    for event, later in early_calls(whole_projection(script)):
        what = "DistributedDataParallel is built" if event.kind == "wrap" else f"{event.name} is called"
        yield CHECK.finding(
            f"{what} before init_process_group has created a process group",
            remedy="Call init_process_group first; torchrun gives every rank the address that it needs.",
            locations=event.location,
            because=(("the group is made here", later.location), ("this call chain leads to it before", event)),
        )


_NEED_GROUP = frozenset(name.removeprefix("torch.distributed.") for name in COLLECTIVES) - {"init_process_group"}


def early_calls(projection: Projection) -> Iterator[tuple[Event, Event]]:
    """Yield the first call that certainly comes before its group is made, in the script's own course, and that."""
    if not projection.walks or joins_by_framework(projection):
        return
    # In the tree, not by ordinals: an object in a loop keeps the number that its first walk gave it.
    done = [event for event in events_in(projection.walks[0].trees[0]) if not event.in_parent]
    joins = next((number for number, event in enumerate(done) if event.name == "init_process_group"), None)
    if joins is None or done[joins].conditions or done[joins].ranks != ALL_RANKS:
        return
    for event in done[:joins]:
        needs = event.kind == "wrap" or event.name in _NEED_GROUP
        if needs and not event.conditions and event.complete:
            yield event, done[joins]
            return
