"""How many threads the ranks of one node of the job run, before they run: torch's own, and the loaders' workers."""

from __future__ import annotations

import msgspec

from ddpdoctor.check import NotStated
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.setup import CpuThreads

TOO_MANY_PER_CORE = 2
THREADS_VARIABLE = "OMP_NUM_THREADS"


class NodeThreads(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks of a node want of its cores."""

    ranks: int
    cores: int
    threads: int
    """On which torch computes in a rank."""
    by_default: bool
    """No one chose so many: there are at least as many without a choice."""
    workers: int
    """Of the training loader of a rank."""
    site: int
    """Where that loader was made; -1 without workers."""

    @property
    def total(self) -> int:
        """Of all ranks of the node."""
        return self.ranks * (self.threads + self.workers)


def crowded_node(record: RunRecord) -> NodeThreads | None:
    """Return the threads of a node that has far too few cores for them; None where it has enough, or nothing could be
    less.

    Raises NotStated where no one has said what the node is and it matters.
    """
    needs = [_need(record, row) for row in record.cpu_threads]
    if not needs:
        return None
    least = min(needs, key=lambda need: need.threads + need.workers)
    if least.threads + least.workers <= 1 and not least.by_default:
        return None
    unknown = [name for name, number in (("cores", least.cores), ("ranks-per-node", least.ranks)) if not number]
    if unknown:
        keys = " and ".join(f"`{name}`" for name in unknown)
        raise NotStated(f"the nodes of the job are not known: state {keys} in [tool.ddpdoctor.job]")
    return least if least.total > TOO_MANY_PER_CORE * least.cores else None


def _need(record: RunRecord, row: CpuThreads) -> NodeThreads:
    """Return what one rank wants; one loader at a time is what it surely draws from."""
    machine = record.job.machine
    training = {entry.loader for entry in record.passes if entry.rank == row.rank and entry.backwards}
    loaders = [entry for entry in record.loaders if entry.rank == row.rank and entry.loader in training]
    largest = max(loaders, key=lambda loader: loader.workers, default=None)
    workers = 0 if largest is None else largest.workers
    chosen = row.chosen or any(setting.name == THREADS_VARIABLE for setting in record.settings)
    # A rank that trains on a GPU hardly uses the threads that no one asked for, and launchers set them to one.
    by_default = not chosen and machine.spreads_threads and not machine.may_use_gpus
    return NodeThreads(
        ranks=machine.ranks_per_node,
        cores=machine.cores,
        # torch takes one for each core without its hyper-threads, of which a core has two at most.
        threads=max(1, machine.cores // 2) if by_default else row.threads,
        by_default=by_default,
        workers=workers,
        site=largest.site if largest is not None and workers else -1,
    )
