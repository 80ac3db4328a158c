"""The job runs more threads than its machine has cores.

What it finds
    In a live run: ranks whose main thread was runnable but found no free core for a fifth of the time or more,
    while the busy threads of the ranks and their loaders' workers were more than one and a half per core. In a
    rehearsal: ranks of a node whose threads and workers will be more than two per core. The number of ranks comes from
    the launch command or the settings (`ranks-per-node` in `[tool.ddpdoctor.job]`); that of cores from the settings
    (`cores`), or from this machine if it has the job's GPUs. torchrun sets one compute thread per rank, unless
    OMP_NUM_THREADS is set; if a script starts its ranks itself, each uses one thread per core, which matters if it
    trains on the CPU.

Why it is bad
    A rank that waits for a core launches its kernels late and answers its peers late, and all ranks wait for the one
    that waits longest. It looks like slow data, slow communication, or a straggler that keeps changing.

Example
    torchrun --nproc-per-node=8 train.py        # num_workers=16 per rank on 32 cores: 136 processes

Remedy
    Fewer workers (cores over ranks, less one), OMP_NUM_THREADS=1 or torch.set_num_threads(1) in ranks that train on a
    GPU, or fewer ranks on a machine without one.

When it is wrong
    If the wait is in a part of the job whose speed does not matter, and where the workers of a rehearsal's
    loader would mostly wait, for a disk or the network.

References
    https://docs.kernel.org/scheduler/sched-stats.html
    https://docs.pytorch.org/docs/stable/notes/multiprocessing.html#cpu-oversubscription
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.finding import Finding, Refuted, Severity

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP508",
    name="cpu-oversubscription",
    severity=dict.fromkeys(("rehearsal", "run"), Severity.ADVICE),
    needs=frozenset({"loaders", "passes", "cpu_threads", "settings"}),
    needs_live=frozenset({"host_uses"}),
)


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the ranks that wait for cores, or are going to."""
    if record.job.kind == "rehearsal":
        yield from _in_rehearsal(record)
        return
    from ddpdoctor.checks.launch.devices_run import core_pressure
    from ddpdoctor.diagnosis.wording import rank_list, verb

    pressure = core_pressure(record)
    if pressure is None:
        return
    wait = verb(pressure.ranks, "waits", "wait")
    yield CHECK.finding(
        "run",
        f"{rank_list(pressure.ranks)} {wait} {100 * pressure.waited_share:.0f}% of the time for a free core",
        remedy="Use fewer workers or threads per rank: cores over ranks, less one.",
        ranks=pressure.ranks,
        because=((f"the job keeps {pressure.busy_threads} threads busy on {pressure.cores} cores", None),),
    )


def _in_rehearsal(record: RunRecord) -> Iterator[Finding]:
    from ddpdoctor.checks.launch.environment_run import crowded_node
    from ddpdoctor.diagnosis.wording import count, site_location

    node = crowded_node(record)
    if node is None:
        return
    least = "at least " if node.by_default else ""
    workers = f" and {count(node.workers, 'worker')} of the training loader" if node.workers else ""
    unset = ": OMP_NUM_THREADS is not set, as torchrun would" if node.by_default else ""
    location = site_location(record.site(node.site))
    yield CHECK.finding(
        "rehearsal",
        f"a node with {count(node.ranks, 'rank')} runs {least}{node.total:,} threads on {count(node.cores, 'core')}",
        remedy=f"Use fewer workers or threads per rank: there are {node.cores / node.ranks:.3g} cores for each.",
        locations=location,
        because=(
            (
                f"each rank has {least}{count(node.threads, 'thread')} for torch's computation{workers}{unset}",
                location,
                {"threads": node.threads, "workers": node.workers, "ranks": node.ranks, "cores": node.cores},
            ),
        ),
    )
