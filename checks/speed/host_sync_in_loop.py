"""Each step of training reads a result back from the GPU.

What it finds
    .item(), .cpu(), .tolist() and .numpy() on a result of the DDP model in the loop over the training loader, in every
    step. All places of a file become one finding.

Why it is bad
    The read waits until the GPU has done everything that was asked of it. Python cannot run ahead any more: the next
    step is prepared only when this one is over, and the GPU idles in between, most of all with small models.

Example
    for batch in loader:
        loss = model(batch).mean()
        loss.backward()
        total += loss.item()

Remedy
    Add up detached tensors on the GPU (`total += loss.detach()`) and read them every 50 steps or once an epoch.

When it is wrong
    Where a step takes so long that the wait does not count, or the script has to know the value to go on.

References
    https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html#avoid-unnecessary-cpu-gpu-synchronization
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.input_speed import reads_in_every_step
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script import Script
from ddpdoctor.source.trace import Event

CHECK = Check(code="DDP406", name="host-sync-in-loop", severity={"source": Severity.ADVICE})


def in_source(script: Script) -> Iterator[Finding]:
    """Report reads from the GPU in every step, one finding a file."""
    files: dict[str, list[Event]] = {}
    for event in reads_in_every_step(whole_projection(script)):
        files.setdefault(str(event.module.path), []).append(event)
    for events in files.values():
        events.sort(key=lambda event: getattr(event.node, "lineno", 0))
        title = f".{events[0].name}() waits for the GPU in every step"
        yield CHECK.finding(
            "source",
            title if len(events) == 1 else f"{title} (one of {len(events)} places)",
            remedy="Add up detached tensors on the GPU, and read them every 50 steps or once an epoch.",
            locations=tuple(event.module.location(event.node) for event in events),
        )
