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
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.checks.speed.input_speed_source import reads_in_every_step
from ddpdoctor.finding import Fact, Finding, Refuted, Severity
from ddpdoctor.source.events import Event
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script.script import Script

if TYPE_CHECKING:
    from ddpdoctor.checks.speed.steps_run import ReadInEveryStep
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP406",
    name="host-sync-in-loop",
    severity=dict.fromkeys(("source", "run"), Severity.ADVICE),
    needs=frozenset({"step_tracks", "host_reads"}),
    subjects=("wrap", "loss"),
    triggers=("DataParallel", "ccelerat", "Fabric", "auto_model"),
)
_REMEDY = "Add up detached tensors on the GPU, and read them every 50 steps or once an epoch."


def in_source(script: Script) -> Iterator[Finding]:
    """Report reads from the GPU in every step, one finding a file."""
    files: dict[str, list[Event]] = {}
    for event in reads_in_every_step(whole_projection(script)):
        files.setdefault(str(event.module.path), []).append(event)
    for events in files.values():
        events.sort(key=lambda event: getattr(event.node, "lineno", 0))
        read = events[0].name
        called = read.removeprefix("builtins.") if read.startswith("builtins.") else f".{read}"
        title = f"{called}() waits for the GPU in every step"
        yield CHECK.finding(
            "source",
            title if len(events) == 1 else f"{title} (one of {len(events)} places)",
            remedy=_REMEDY,
            locations=tuple(event.location for event in events),
        )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the lines that were seen to read from the GPU in every step, one finding a file."""
    from ddpdoctor.checks.speed.steps_run import sampled_reads
    from ddpdoctor.diagnosis.wording import milliseconds_text

    files: dict[str, list[ReadInEveryStep]] = {}
    for read in sampled_reads(record):
        files.setdefault(read.location.file, []).append(read)
    for reads in files.values():
        reads.sort(key=lambda read: read.location.line)
        worst = max(reads, key=lambda read: read.wait_ns)
        places = f" (one of {len(reads)} places)" if len(reads) > 1 else ""
        yield CHECK.finding(
            "run",
            f"{worst.name} waits for the GPU in every step, {milliseconds_text(worst.wait_ns)} each{places}",
            remedy=_REMEDY,
            what_if=("host_syncs=dropped",),
            locations=tuple(dict.fromkeys(read.location for read in reads)),
            ranks=tuple(sorted({rank for read in reads for rank in read.ranks})),
            evidence=tuple(
                Fact(
                    text=f"{read.name} in {read.steps_with} of {read.steps} sampled steps, "
                    f"{read.calls_per_step:.1f} times per step, waiting {milliseconds_text(read.wait_ns)} of it",
                    basis="run",
                    numbers={"steps_with": read.steps_with, "steps": read.steps, "wait_ns": read.wait_ns},
                    location=read.location,
                )
                for read in reads[:8]
            ),
        )
