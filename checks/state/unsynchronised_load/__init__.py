"""Ranks read a file that rank 0 is still writing.

What it finds
    A file that one rank writes (torch.save, open for writing, numpy, safetensors, pandas, shutil), followed on all
    ranks by a read of the same path, with no barrier, other collective or construction of DDP between the two. In a
    run: any file that one rank writes and another reads, where no chain of collectives, no lock and no file waited for
    orders the two; an error where the reader fails with it.

Why it is bad
    The other ranks do not write, so they reach the read first. They find no file, the file of an earlier run, or half
    of a new one: the job fails now and then, or silently continues from different weights on each rank.

Example
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), path)
    model.load_state_dict(torch.load(path, map_location="cpu"))

Remedy
    Put dist.barrier() between the write and the read, on all ranks.

When it is wrong
    Where the ranks wait for each other by other means, such as a lock or a file that is polled.

References
    https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html#save-and-load-checkpoints
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.checks.state.unsynchronised_load.source import early_loads
from ddpdoctor.finding import Fact, Finding, Refuted, Severity
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.ranks.ranks import ranks_text
from ddpdoctor.source.script.script import Script

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP603",
    name="unsynchronised-load",
    stands_for="early-read",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.WARNING),
    needs=frozenset({"ranks", "files", "accesses", "collectives"}),
    subjects=("job",),
    triggers=("save", "open", "write_text", "write_bytes", "to_csv", "to_parquet", "dump", "shutil"),
)
REMEDY = "Call dist.barrier() on all ranks between the write and the read."


def in_source(script: Script) -> Iterator[Finding]:
    """Report loads that may come before the save of another rank has ended."""
    for early in early_loads(whole_projection(script)):
        load, save = early.load, early.save
        writer = ranks_text(save.ranks)
        write = "write" if save.ranks & (save.ranks - 1) else "writes"
        yield CHECK.finding(
            "source",
            f"all ranks read {early.path}, which {writer} {write} just before, and no rank waits for the write",
            remedy=REMEDY,
            locations=(load.module.location(load.node), save.module.location(save.node)),
            evidence=(
                Fact(
                    text=f"only {writer} {write} here; there is no collective between this and the read",
                    basis="source",
                    location=save.module.location(save.node),
                    stack=save.chain,
                ),
            ),
        )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report reads of what another rank writes; refute those that collectives order."""
    from ddpdoctor.diagnosis.divergence_findings import path_findings

    yield from path_findings(CHECK, record, REMEDY)
