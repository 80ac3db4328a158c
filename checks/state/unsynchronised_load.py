"""Ranks read a file that rank 0 is still writing.

What it finds
    A torch.save on one rank, followed on all ranks by a torch.load of the same path, with no barrier, other collective
    or construction of DDP between the two.

Why it is bad
    The other ranks do not save, so they come to the load first. They find no file, the file of an earlier run, or half
    of a new one: the job fails now and then, or continues from different weights on each rank without a word.

Example
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), path)
    model.load_state_dict(torch.load(path, map_location="cpu"))

Remedy
    Put dist.barrier() between the save and the load, on all ranks.

When it is wrong
    Where the ranks wait for each other by other means, such as a lock or a file that is polled.

References
    https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html#save-and-load-checkpoints
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check
from ddpdoctor.finding import Fact, Finding, Severity
from ddpdoctor.source.loads import early_loads
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.ranks import spoken
from ddpdoctor.source.script import Script

CHECK = Check(code="DDP603", name="unsynchronised-load", severity={"source": Severity.WARNING})


def in_source(script: Script) -> Iterator[Finding]:
    """Report loads that may come before the save of another rank has ended."""
    for early in early_loads(whole_projection(script)):
        load, save = early.load, early.save
        yield CHECK.finding(
            "source",
            f"all ranks load {early.path} right after {spoken(save.ranks)} saves it, and do not wait for it",
            remedy="Call dist.barrier() on all ranks between the save and the load.",
            locations=(load.module.location(load.node), save.module.location(save.node)),
            evidence=(
                Fact(
                    text=f"only {spoken(save.ranks)} saves here; no collective stands between this and the load",
                    basis="source",
                    location=save.module.location(save.node),
                    stack=save.chain,
                ),
            ),
        )
