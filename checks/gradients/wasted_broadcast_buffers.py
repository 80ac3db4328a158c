"""DDP broadcasts buffers in every forward that are the same on all ranks anyway.

What it finds
    Buffers of a DDP model that are broadcast from rank 0 at the start of each training forward (the default) although
    they never change, or although every rank already holds the same values. Warning from 1 MB a step, advice below.

Why it is bad
    The broadcast comes before the forward, so nothing hides it: its whole time is added to every step.

Example
    self.register_buffer("mask", torch.tril(torch.ones(4096, 4096)))     # 64 MiB in every step

Remedy
    Keep the buffers in step at construction only: forward_sync_buffers=False from torch 2.13, broadcast_buffers=False
    before. Running statistics that differ between ranks then stay different; SyncBatchNorm makes them agree.

When it is wrong
    Where the buffers change later than the steps that were seen, and differently on the ranks.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from ddpdoctor.check import Check
from ddpdoctor.finding import Fact, Finding, Location, Refuted, Severity
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.script.script import Script
from ddpdoctor.source.torch_model.buffers import constant_buffers

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP203",
    name="wasted-broadcast-buffers",
    severity={"source": Severity.ADVICE, "rehearsal": Severity.WARNING, "run": Severity.WARNING},
    needs=frozenset({"wraps", "buffers"}),
    subjects=("model",),
    triggers=("DataParallel", "Accelerator"),
)
WARNING_BYTES = 1_000_000
"""Bytes a step from which the waste is a warning."""


def in_source(script: Script) -> Iterator[Finding]:
    """Report wraps of modules whose buffers nothing changes after their construction."""
    for idle in idle_broadcasts(whole_projection(script)):
        size = f" ({'' if idle.exact else 'at least '}{idle.size_bytes / 1e6:,.3g} MB)" if idle.size_bytes else ""
        yield CHECK.finding(
            "source",
            f"DDP broadcasts {', '.join(idle.names)}{size} in every training forward, and no method of the module "
            + ("changes it" if len(idle.names) == 1 else "changes them"),
            remedy="Pass forward_sync_buffers=False (torch 2.13 and later) or broadcast_buffers=False to "
            "DistributedDataParallel.",
            locations=idle.location,
            evidence=tuple(
                Fact(text=f"buffer {name} is registered here", basis="source", location=place)
                for name, place in zip(idle.names, idle.registered, strict=True)
            ),
            severity=Severity.WARNING if idle.size_bytes >= WARNING_BYTES else Severity.ADVICE,
        )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report each wrap whose broadcasts in forward change nothing."""
    from ddpdoctor.diagnosis.performance.traffic import wasted_broadcasts

    for waste in wasted_broadcasts(record):
        if waste.needed_buffers and waste.wasted_bytes < WARNING_BYTES:
            continue
        fact = Fact(
            text=f"{', '.join(waste.names)}: digests on {waste.ranks} ranks were equal before each of "
            f"{waste.forwards} synchronised forwards",
            basis=record.job.kind,
            numbers={
                "bytes_per_step": waste.wasted_bytes,
                "broadcasts_per_step": waste.broadcasts_per_step,
                "buffers": waste.buffers,
                "forwards": waste.forwards,
            },
            location=waste.location,
        )
        yield CHECK.finding(
            record.job.kind,
            waste.sentence,
            remedy=waste.remedy,
            what_if=("broadcast_buffers=false",),
            locations=waste.location,
            evidence=(fact,),
            severity=None if waste.wasted_bytes >= WARNING_BYTES else Severity.ADVICE,
        )


# Wraps whose DDP broadcasts buffers that nothing changes.

BROADCAST_POSITION = 4
"""Position of ``broadcast_buffers`` among DDP's arguments."""


class IdleBroadcast(msgspec.Struct, frozen=True, kw_only=True):
    """A wrap that broadcasts buffers which nothing changes."""

    location: Location
    names: tuple[str, ...]
    size_bytes: int
    exact: bool
    """The size of every buffer is known; otherwise ``size_bytes`` is the sum of those that are."""
    registered: tuple[Location, ...]
    """Where each buffer is registered."""


def idle_broadcasts(projection: Projection) -> Iterator[IdleBroadcast]:
    """Wraps with the default synchronisation of buffers, of modules that only their constructors give buffers."""
    for made in projection.of_kind("wrap"):
        options = ("broadcast_buffers", "forward_sync_buffers")
        if (
            not made.complete
            or len(made.positional) > BROADCAST_POSITION
            or any(name in made.named for name in options)
        ):
            continue
        module = made.argument("module", 0)
        buffers = constant_buffers(projection.machine, module) if module is not None else None
        if buffers is not None:
            yield IdleBroadcast(
                location=made.location,
                names=buffers.names,
                size_bytes=buffers.size_bytes,
                exact=buffers.exact,
                registered=buffers.locations,
            )
