"""Forked processes use CUDA, which their parent has initialised.

What it finds
    A DataLoader with worker processes whose data set moves tensors to a GPU in `__getitem__`, or whose collate_fn does;
    and ranks started with Process(target=...) that use CUDA after the process that starts them has. Both in a script
    that keeps the default way of starting processes, which on Linux is fork before Python 3.14. In a run: a forked
    process that failed for this reason, or that called a collective of its parent's process group.

Why it is bad
    CUDA does not survive a fork: the processes fail with "Cannot re-initialize CUDA in forked subprocess". Where it
    does not fail, because the parent has not touched CUDA yet, each worker of each rank holds a context of several
    hundred megabytes on the GPU. A process group does not survive a fork either: a collective in a worker hangs.

Example
    def __getitem__(self, index):
        return self.images[index].cuda()

Remedy
    Return CPU tensors from the data set, pin them (pin_memory=True), and move the batch in the training loop with
    non_blocking=True. Start ranks with torch.multiprocessing.spawn or torchrun.

When it is wrong
    Where processes are started by spawn outside of what was read.

References
    https://docs.pytorch.org/docs/stable/notes/multiprocessing.html#cuda-in-multiprocessing
    https://docs.pytorch.org/docs/stable/data.html#multi-process-data-loading
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.checks.launch.fork_after_cuda.source import forked_cuda, forked_ranks
from ddpdoctor.finding import Fact, Finding, Refuted, Severity
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script.script import Script

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP511",
    name="fork-after-cuda",
    stands_for="cuda-after-fork",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.WARNING),
    needs=frozenset({"ranks", "forked_uses", "device_uses"}),
    subjects=("job",),
    triggers=("num_workers", "Process"),
)
REMEDY = "Return CPU tensors, with pin_memory=True in the loader, and move the batch in the training loop."


def in_source(script: Script) -> Iterator[Finding]:
    """Report uses of CUDA in code that forked workers of a loader, or forked ranks, run."""
    for forked in forked_cuda(whole_projection(script)):
        loader = forked.loader
        yield CHECK.finding(
            "source",
            f"{forked.within} runs in forked worker processes of a DataLoader and uses CUDA there",
            remedy=REMEDY,
            locations=(forked.module.location(forked.use),),
            evidence=(
                Fact(
                    text="this loader starts the worker processes",
                    basis="source",
                    location=loader.module.location(loader.node),
                    stack=loader.chain,
                ),
            ),
        )
    for rank in forked_ranks(whole_projection(script)):
        yield CHECK.finding(
            "source",
            "this rank is forked from a process that has initialised CUDA, and uses CUDA itself",
            remedy='Start the ranks by spawn: torch.multiprocessing.spawn, or set_start_method("spawn"); or do not '
            "use CUDA before they are started.",
            locations=(rank.use.module.location(rank.use.node),),
            evidence=(
                Fact(
                    text="the parent initialises CUDA here",
                    basis="source",
                    location=rank.parent.module.location(rank.parent.node),
                    stack=rank.parent.chain,
                ),
            ),
        )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report forked processes that used what their parent had initialised."""
    from ddpdoctor.checks.launch.fork_after_cuda.run import broken_forks

    for fork in broken_forks(record):
        yield CHECK.finding(
            record.job.kind,
            fork.sentence,
            remedy=REMEDY if fork.uses_cuda else "Call collectives in the ranks' own processes only.",
            locations=() if fork.location is None else (fork.location,),
            ranks=fork.ranks,
            evidence=(Fact(text=fork.fact, basis=record.job.kind, location=fork.location),),
        )
