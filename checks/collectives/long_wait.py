"""The ranks wait for one that is busy with something long.

What it finds
    Preprocessing of a data set (`dataset.map`) or generation in a loop (`model.generate`) that only the first rank
    does, while the others go on to their next collective, in a script that keeps the default timeout.

Why it is bad
    The others stand in that collective until the first rank comes: all but one GPU idle. Once the work takes longer
    than the timeout of the group (10 minutes with NCCL, 30 with gloo), the job is ended: with all the data, not in the
    test with a little.

Example
    if rank == 0:
        dataset = raw.map(tokenize)         # 25 minutes on the whole corpus
    dist.barrier()                          # NCCL gives up after 10

Remedy
    Divide the work between the ranks, or do it before the job. Where one rank must do it, pass
    timeout=timedelta(hours=2) to init_process_group.

When it is wrong
    Where the work is short, or its result is cached from an earlier run.

References
    https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.init_process_group
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check
from ddpdoctor.finding import Fact, Finding, Severity
from ddpdoctor.source.long_waits import long_waits
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script import Script

CHECK = Check(code="DDP307", name="long-wait", severity={"source": Severity.WARNING})


def in_source(script: Script) -> Iterator[Finding]:
    """Report long work of the first rank with a collective behind it."""
    for wait in long_waits(whole_projection(script)):
        yield CHECK.finding(
            "source",
            f"the first rank {wait.what} here while the others wait in {wait.collective} at line "
            f"{wait.collective_location.line}, for no longer than the default timeout",
            remedy="Divide the work between the ranks or do it before the job; or give init_process_group a timeout "
            "that covers it.",
            locations=(wait.location, wait.collective_location, wait.condition_location),
            evidence=(
                Fact(
                    text=f"`{wait.condition}` lets the first rank through",
                    basis="source",
                    location=wait.condition_location,
                ),
                Fact(
                    text=f"the others wait in this {wait.collective}",
                    basis="source",
                    location=wait.collective_location,
                ),
            ),
        )
