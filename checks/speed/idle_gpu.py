"""A GPU computes for less than half of the training.

What it finds
    In a live run: GPUs whose utilisation, without the time in which only communication kernels ran, is below 50% over
    at least 20 s of training steps, where neither waiting for data nor exposed communication is the reason. Set a limit
    other than 50% with `idle-gpu = 0.3` under `[tool.ddpdoctor.thresholds]`.

Why it is bad
    The job pays for idle hardware. Usually the GPU waits for Python: many small kernels that are launched
    one by one, results that are read back in every step (.item(), printing), work on the CPU between the phases, or
    explicit collectives. A GPU that waits for other ranks in a kernel of NCCL still reads as 100% busy, so that figure
    alone says nothing.

Example
    for x, y in loader:                     # 3 ms of kernels a step, 9 ms of Python
        loss = model(x).mean() + sum(p.abs().sum() for p in model.parameters())

Remedy
    Larger batches, torch.compile (or CUDA graphs) against the cost of launching, no reading of results in every step
    (DDP406), and the work that the CPU does between the steps in the loader's workers.

When it is wrong
    Where the model is too small to fill the GPU and the time of a step does not matter.

References
    https://docs.nvidia.com/deploy/nvml-api/structnvmlUtilization__t.html
    https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.finding import Fact, Finding, Refuted, Severity

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP405", name="idle-gpu", severity={"run": Severity.WARNING}, needs=frozenset({"gpus", "step_tracks"})
)


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the GPUs that mostly stand still, as one finding."""
    from ddpdoctor.checks.speed.gpus_run import idle_gpus
    from ddpdoctor.diagnosis.wording import rank_list

    idle = sorted(idle_gpus(record), key=lambda use: use.computing_percent)
    if not idle:
        return
    ranks = sorted({rank for use in idle for rank in use.ranks})
    worst, best = idle[0].computing_percent, idle[-1].computing_percent
    figure = f"{worst:.0f}%" if round(worst) == round(best) else f"{worst:.0f} to {best:.0f}%"
    noun = "GPU" if len(idle) == 1 else "GPUs"
    facts = []
    for use in idle[:4]:
        busy = f"the driver reads {use.utilisation_percent:.0f}%"
        if use.utilisation_percent - use.computing_percent >= 1:
            busy += f", of which {use.utilisation_percent - use.computing_percent:.0f}% is communication kernels alone"
        facts.append(
            f"GPU {use.index} ({rank_list(use.ranks)}): {busy}; of a step of {use.step_ns / 1e6:.1f} ms,"
            f" {use.data_wait_share:.0%} waits for data, {use.exposed_share:.0%} is exposed communication,"
            f" {use.explicit_share:.0%} explicit collectives"
        )
    yield CHECK.finding(
        "run",
        f"the {noun} of {rank_list(ranks)} compute{'s' if len(idle) == 1 else ''} for {figure} of the training",
        remedy="Make larger batches or use torch.compile, and take .item(), printing and other CPU work out of the"
        " loop.",
        ranks=tuple(ranks),
        evidence=tuple(Fact(text=text, basis="run") for text in facts),
    )
