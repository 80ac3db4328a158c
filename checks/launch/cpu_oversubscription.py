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

from ddpdoctor.check import Check, RunRecord
from ddpdoctor.checks.launch.environment_run import core_pressure, crowded_node
from ddpdoctor.finding import Finding, Refuted, Severity

CHECK = Check(
    code="DDP508",
    name="cpu-oversubscription",
    severity=dict.fromkeys(("rehearsal", "run"), Severity.ADVICE),
    needs=frozenset({"loaders", "passes", "cpu_threads", "settings"}),
    needs_live=frozenset({"host_uses"}),
)


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the ranks that wait for cores, or are going to."""
    kind = record.job.kind
    yield from CHECK.judged(kind, crowded_node(record) if kind == "rehearsal" else core_pressure(record))
