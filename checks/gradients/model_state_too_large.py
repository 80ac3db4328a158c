"""The state of the model takes most of the GPU's memory.

What it finds
    Weights, gradients, DDP's buckets and the optimizer's state that take more than 60% of the GPU's memory (for 80%,
    `model-state-too-large = 0.8` under `[tool.ddpdoctor.thresholds]`): in a live run as they lie on it, in a rehearsal
    as they are after a step. A rehearsal without the job's GPUs knows their memory from the settings
    (`device-memory-gib` in `[tool.ddpdoctor.job]`) and judges nothing without.

Why it is bad
    DDP keeps all of it on every GPU; with Adam in mixed precision that is 16 bytes a parameter or more. The remainder
    for activations allows small batches only, so that the GPU computes little for each gradient that it sends, and a
    long sample or a larger evaluation batch ends the job because memory runs out.

Example
    model = DDP(GPT2XL().to(device))            # 6 GB of weights, 6 of gradients, 12 of Adam on a GPU of 40 GB

Remedy
    FSDP or ZeroRedundancyOptimizer, which shard the state over the ranks; gradient_as_bucket_view=True, which
    stores the gradients once; a smaller optimizer state (8-bit Adam, Adafactor).

When it is wrong
    If the batch that fits is large enough. Where the script chooses another model on a GPU than on a CPU.

References
    https://docs.pytorch.org/docs/stable/fsdp.html
    https://docs.pytorch.org/docs/stable/distributed.optim.html
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check, RunRecord
from ddpdoctor.checks.gradients.steps_run import ModelState, large_states
from ddpdoctor.diagnosis.wording import site_location
from ddpdoctor.finding import Finding, Refuted, Severity

CHECK = Check(
    code="DDP212",
    name="model-state-too-large",
    severity=dict.fromkeys(("rehearsal", "run"), Severity.WARNING),
    needs=frozenset({"optimizer_sizes", "optimizer_steps", "wraps"}),
    needs_live=frozenset({"gpus", "optimizer_sizes"}),
)

_STATED = "`device-memory-gib` in [tool.ddpdoctor.job] gives a GPU"


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the GPUs that the model's state fills, by the one that is fullest."""
    states = list(large_states(record))
    if not states:
        return
    worst = max(states, key=lambda state: state.total_bytes / state.memory_bytes)
    ranks = tuple(sorted({rank for state in states for rank in state.ranks}))
    wraps = [wrap for wrap in record.wraps if wrap.rank in worst.ranks]
    largest = max(wraps, key=lambda wrap: sum(tensor.size_bytes for tensor in wrap.parameters), default=None)
    location = None if largest is None else site_location(record.site(largest.site))
    whole = _size(worst.memory_bytes).replace(".0", "")
    large = ((name, size) for name, size in worst.parts.items() if size > 0.001 * worst.memory_bytes)
    yield CHECK.finding(
        f"weights, gradients and optimizer take {worst.total_bytes / worst.memory_bytes:.0%} of the GPU's memory",
        basis=record.job.kind,
        remedy="Shard the weights and gradients, too: with FSDP."
        if worst.shared
        else "Shard the state with FSDP or ZeroRedundancyOptimizer.",
        ranks=() if ranks == record.rank_numbers() else ranks,
        locations=location,
        because=(
            *((f"{name}: {_size(size)} of {whole}", None, {"bytes": size}) for name, size in large),
            (_left(worst), None),
            *(((f"{_STATED} {whole}", None),) if worst.stated else ()),
        ),
    )


def _left(state: ModelState) -> str:
    """Say what is left for the activations."""
    left = state.memory_bytes - state.total_bytes
    if left <= 0:
        return f"it does not fit: {_size(-left)} are missing, not counting the activations of a batch"
    return f"{_size(left)} are left for the activations of a batch"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.1f} MiB"
