"""The state of the model takes most of the GPU's memory.

What it finds
    In a live run: weights, gradients, DDP's buckets and the optimizer's state, as they lie on the GPU, that take more
    than 60 % of its memory (for 80 %, `model-state-too-large = 0.8` under `[tool.ddpdoctor.thresholds]`).

Why it is bad
    DDP keeps all of it on every GPU; with Adam in mixed precision that is 16 bytes a parameter or more. What is left
    for activations allows small batches only, so that the GPU computes little for each gradient that it sends, and a
    long sample or a larger evaluation batch ends the job for want of memory.

Example
    model = DDP(GPT2XL().to(device))            # 6 GB of weights, 6 of gradients, 12 of Adam on a GPU of 40 GB

Remedy
    FSDP or ZeroRedundancyOptimizer, which share the state out over the ranks; gradient_as_bucket_view=True, which
    stores the gradients once; a smaller optimizer state (8-bit Adam, Adafactor).

When it is wrong
    Where the batch that fits is all that is wanted.

References
    https://docs.pytorch.org/docs/stable/fsdp.html
    https://docs.pytorch.org/docs/stable/distributed.optim.html
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.finding import Fact, Finding, Refuted, Severity

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP212",
    name="model-state-too-large",
    severity={"run": Severity.WARNING},
    needs=frozenset({"gpus", "optimizer_sizes"}),
)


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the GPUs that the model's state fills, by the one that is fullest."""
    from ddpdoctor.diagnosis.model_state import large_states

    states = list(large_states(record))
    if not states:
        return
    worst = max(states, key=lambda state: state.total_bytes / (state.gpu.memory_total_bytes or 1))
    total = worst.gpu.memory_total_bytes or 1
    parts = (
        ("weights", worst.parameter_bytes),
        ("gradients", worst.gradient_bytes),
        ("DDP's buckets", worst.bucket_bytes),
        (f"the state of {' and '.join(worst.optimizers)}", worst.optimizer_bytes),
    )
    yield CHECK.finding(
        "run",
        f"weights, gradients and optimizer take {worst.total_bytes / total:.0%} of the GPU's memory",
        remedy="Share the state out with FSDP or ZeroRedundancyOptimizer.",
        ranks=tuple(sorted({rank for state in states for rank in state.gpu.ranks})),
        evidence=tuple(
            Fact(text=f"{name}: {size / 2**30:.1f} GiB of {total / 2**30:.0f} GiB", basis="run")
            for name, size in parts
            if size
        ),
    )
