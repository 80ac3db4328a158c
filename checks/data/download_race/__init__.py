"""Every rank downloads or extracts to the same path at once.

What it finds
    A dataset with `download=True` or of PyTorch Geometric, a call that fetches a file, or an archive that is extracted,
    reached by all ranks without one of them going first; also a dataset that only the first rank downloads while the
    others open it. In a run: data that several ranks fetch, or write where it is missing and then read, with no
    collective between one rank's write and what the other does.

Why it is bad
    The ranks overwrite each other's files: a rank reads a file that another is still writing, checksums fail now and
    then, an archive is extracted while it is being replaced. It also sends the server one request per rank.

Example
    dataset = torchvision.datasets.CIFAR10("data", download=True)

Remedy
    Let rank 0 (the first rank of each node, where disks are not shared) download, then a barrier, then let all ranks
    open what is there: if rank == 0: CIFAR10("data", download=True), dist.barrier(), CIFAR10("data").

When it is wrong
    If the files are in place before the job starts, or every rank has its own disk.

References
    https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.barrier
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.checks.data.download_race.source import by_directory, shared_downloads
from ddpdoctor.finding import Fact, Finding, Refuted, Severity
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script.script import Script

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP109",
    name="download-race",
    stands_for="download-race",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.WARNING),
    needs=frozenset({"ranks", "files", "accesses", "collectives"}),
    subjects=("job",),
    triggers=(
        "download",
        "urlretrieve",
        "extractall",
        "unpack_archive",
        "torchtext",
        "fetch_",
        "hub",
        "torch_geometric",
        "ogb",
    ),
)
REMEDY = "Let rank 0 do it first, then dist.barrier(), then let every rank open what is there."


def in_source(script: Script) -> Iterator[Finding]:
    """Report downloads that all ranks do at the same time, one finding for a directory."""
    for downloads in by_directory(shared_downloads(whole_projection(script))):
        event = downloads[0].event
        place = event.module.location(event.node)
        yield CHECK.finding(
            "source",
            "the other ranks look for these data while the first one downloads them"
            if downloads[0].what == "looks"
            else f"every rank {downloads[0].what} to the same path at once",
            remedy=REMEDY,
            locations=tuple(one.event.module.location(one.event.node) for one in downloads),
            evidence=(
                Fact(
                    text="no rank test or barrier lets one rank go first",
                    basis="source",
                    location=place,
                    stack=event.chain,
                ),
            ),
        )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report data that several ranks prepare at once; refute where one goes first."""
    from ddpdoctor.diagnosis.divergence_findings import path_findings

    yield from path_findings(CHECK, record, REMEDY)
