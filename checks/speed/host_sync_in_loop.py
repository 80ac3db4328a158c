"""Each step of training reads a result back from the GPU.

What it finds
    .item(), .cpu(), .tolist() and .numpy() on a result of the DDP model in the loop over the training loader, in every
    step. In a live run: .item(), .cpu(), .tolist(), float(), int() and truth values of tensors on the GPU in nine of
    ten sampled steps, where they wait for at least 1% of the step. All places of a file become one finding.

Why it is bad
    The read waits until the GPU has finished all queued work. Python can no longer run ahead: the next step is prepared
    only when this one is finished, and the GPU idles in between, especially with small models.

Example
    for batch in loader:
        loss = model(batch).mean()
        loss.backward()
        total += loss.item()

Remedy
    Add up detached tensors on the GPU (`total += loss.detach()`) and read them every 50 steps or once an epoch.

When it is wrong
    If a step takes so long that the wait does not matter, or the script needs the value to continue.

References
    https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html#avoid-unnecessary-cpu-gpu-synchronization
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check, Script
from ddpdoctor.checks.speed.input_bound import reads_in_every_step
from ddpdoctor.finding import Finding, Severity, grouped
from ddpdoctor.source.projection import whole_projection

CHECK = Check(
    code="DDP406",
    name="host-sync-in-loop",
    severity=dict.fromkeys(("source", "run"), Severity.ADVICE),
    needs=frozenset({"step_tracks", "host_reads"}),
    subjects=("wrap", "loss"),
    triggers=("DataParallel", "ccelerat", "Fabric", "auto_model", "deepspeed"),
)
_REMEDY = "Add up detached tensors on the GPU, and read them every 50 steps or once an epoch."


def in_source(script: Script) -> Iterator[Finding]:
    """Report reads from the GPU in every step, one finding a file."""
    reads = reads_in_every_step(whole_projection(script))
    for events in grouped(reads, lambda event: str(event.module.path)).values():
        events.sort(key=lambda event: getattr(event.node, "lineno", 0))
        read = events[0].name
        called = read.removeprefix("builtins.") if read.startswith("builtins.") else f".{read}"
        title = f"{called}() waits for the GPU in every step"
        yield CHECK.finding(
            title if len(events) == 1 else f"{title} (one of {len(events)} places)",
            remedy=_REMEDY,
            locations=tuple(event.location for event in events),
        )


in_run = CHECK.judged_by("checks.speed.steps_run", "sampled_reads", _REMEDY)
