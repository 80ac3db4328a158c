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

from ddpdoctor.check import Check, Script
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.torch_model.buffers import constant_buffers

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


in_run = CHECK.judged_by("diagnosis.performance.traffic", "wasted_broadcasts", "", WARNING_BYTES)


BROADCAST_POSITION = 4
"""Position of ``broadcast_buffers`` among DDP's arguments."""


def in_source(script: Script) -> Iterator[Finding]:
    """Report wraps of modules whose buffers nothing changes after their construction."""
    projection = whole_projection(script)
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
            least, names = "" if buffers.exact else "at least ", buffers.names
            size = f" ({least}{buffers.size_bytes / 1e6:,.3g} MB)" if buffers.size_bytes else ""
            yield CHECK.finding(
                f"DDP broadcasts {', '.join(names)}{size} in every training forward, and no method of the module "
                + ("changes it" if len(names) == 1 else "changes them"),
                remedy="Pass forward_sync_buffers=False (torch 2.13 and later) or broadcast_buffers=False to "
                "DistributedDataParallel.",
                locations=made.location,
                because=tuple(
                    (f"buffer {name} is registered here", place)
                    for name, place in zip(names, buffers.locations, strict=True)
                ),
                severity=Severity.WARNING if buffers.size_bytes >= WARNING_BYTES else Severity.ADVICE,
            )
