"""Backward is long enough to hide the communication, but does not.

What it finds
    In a live run: gradients whose transfer is exposed for more than 10% of the step although the computation of
    backward takes longer than all of their communication, less than half of which it hides.

Why it is bad
    DDP sends a bucket of gradients as soon as it is full, while backward continues with the layers before it. Otherwise
    the transfer follows the computation instead of overlapping with it.

Example
    model = DDP(net, bucket_cap_mb=500)         # one bucket: it is full when backward is over

Remedy
    With one or two buckets: a smaller bucket_cap_mb. Otherwise: layers used in the order in which they were defined, no
    find_unused_parameters, and static_graph=True where the graph never changes.

When it is wrong
    Where most of the parameters belong to the layers next to the input (large embeddings): their gradients come last.
    On CPUs, computation and communication share the cores.

References
    https://docs.pytorch.org/docs/stable/notes/ddp.html#internal-design
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.finding import Fact, Finding, Refuted, Severity

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP402",
    name="poor-overlap",
    severity={"run": Severity.ADVICE},
    needs=frozenset({"step_tracks", "call_tracks"}),
)
_FEW_BUCKETS = 2


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report communication that backward could have hidden, with its buckets."""
    from ddpdoctor.diagnosis.performance.exposure import unhidden
    from ddpdoctor.diagnosis.wording import bytes_text, milliseconds_text

    found = unhidden(record)
    if found is None:
        return
    exposure, hidden = found
    sent = exposure.traffic[0]
    buckets = max(1.0, sent.calls_per_step)
    yield CHECK.finding(
        "run",
        f"{hidden:.0%} of the communication of gradients is hidden, although backward computes for "
        f"{milliseconds_text(exposure.backward_compute_ns)} a step and {milliseconds_text(exposure.exposed_ns)} of "
        "transfer are exposed",
        remedy="Pass a smaller bucket_cap_mb to DDP, so that the first bucket is sent while backward computes."
        if buckets <= _FEW_BUCKETS
        else "Define layers in the order of their use, omit find_unused_parameters, and try static_graph=True.",
        what_if=("communication=hidden",),
        evidence=(
            Fact(
                text=f"{bytes_text(round(sent.bytes_per_step))} of gradients in {buckets:.3g} buckets of "
                f"{bytes_text(round(sent.bytes_per_step / buckets))} a step",
                basis="run",
                numbers={"bytes_per_step": sent.bytes_per_step, "buckets_per_step": sent.calls_per_step},
            ),
        ),
    )
