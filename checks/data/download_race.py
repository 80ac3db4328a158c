"""Every rank downloads or extracts to the same path at once.

What it finds
    A dataset with `download=True`, a call that fetches a file, or an archive that is extracted, reached by all ranks
    without one of them going first.

Why it is bad
    The ranks write over each other: a rank reads a file that another is still writing, checksums fail now and then, an
    archive is extracted while it is being replaced. It also asks the server as many times as there are ranks.

Example
    dataset = torchvision.datasets.CIFAR10("data", download=True)

Remedy
    Let rank 0 (the first rank of each node, where disks are not shared) download, then a barrier, then let all ranks
    open what is there: if rank == 0: CIFAR10("data", download=True), dist.barrier(), CIFAR10("data").

When it is wrong
    Where the files are in place before the job starts, or every rank has a disk of its own.

References
    https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.barrier
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check
from ddpdoctor.finding import Fact, Finding, Severity
from ddpdoctor.source.downloads import shared_downloads
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script import Script

CHECK = Check(code="DDP109", name="download-race", severity={"source": Severity.WARNING})


def in_source(script: Script) -> Iterator[Finding]:
    """Report downloads that all ranks do at the same time."""
    for download in shared_downloads(whole_projection(script)):
        event = download.event
        place = event.module.location(event.node)
        yield CHECK.finding(
            "source",
            f"every rank {download.what} to the same path at once",
            remedy="Let rank 0 do it first, then dist.barrier(), then let every rank open what is there.",
            locations=(place,),
            evidence=(
                Fact(
                    text="no rank test and no barrier lets one rank go first",
                    basis="source",
                    location=place,
                    stack=event.chain,
                ),
            ),
        )
