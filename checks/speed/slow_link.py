"""Gradients move far slower than the link between the GPUs should carry them.

What it finds
    In a live run on the GPUs of one node: gradients of 10 MB a step or more whose bus bandwidth is below 15% of the
    nominal bandwidth of NVLink or PCIe, measured where nothing hides the transfer. NCCL reaches 30 to 80%.

Why it is bad
    A degraded link (PCIe instead of NVLink, half the lanes, traffic through the CPU or a socket) slows down
    every step, and nothing reports it.

Example
    NCCL_P2P_DISABLE=1 left over from an earlier search for a bug

Remedy
    `nvidia-smi topo -m` and `nvidia-smi nvlink --status` show the links; NCCL_DEBUG=INFO which of them NCCL uses.

When it is wrong
    Where many small buckets make latency decide. The bandwidth is a lower bound: the window also holds pauses between
    the buckets.

References
    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.finding import Finding, Refuted, Severity

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP408",
    name="slow-link",
    severity={"run": Severity.WARNING},
    needs=frozenset({"step_tracks", "call_tracks", "gpus"}),
)

EXPECTED_SHARE = 0.5
"""Of the standard: NCCL reaches 30 to 80% of it."""


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the groups whose link is far from its speed, with what a ring would take beside it."""
    from ddpdoctor.checks.speed.steps_run import slow_links
    from ddpdoctor.diagnosis.wording import bytes_text, milliseconds_text

    for slow in slow_links(record):
        speed, limit = bytes_text(round(slow.bandwidth_bytes_per_s)), bytes_text(round(slow.limit_bytes_per_s))
        yield CHECK.finding(
            "run",
            f"gradients of {slow.group} move at {speed}/s on the bus, {slow.share:.0%} of what {slow.link} carries "
            f"({limit}/s)",
            remedy=(
                "Look at `nvidia-smi topo -m` and `nvidia-smi nvlink --status`, and at what NCCL_DEBUG=INFO reports."
            ),
            what_if=(f"link_gbit_per_s={EXPECTED_SHARE * slow.limit_bytes_per_s * 8 / 1e9:g}",),
            because=(
                (
                    f"{bytes_text(round(slow.bytes_per_step))} a step take {milliseconds_text(slow.measured_ns)}; "
                    f"a ring over this link takes {milliseconds_text(slow.expected_ns)} at full speed",
                    None,
                    {
                        "bus_bandwidth_bytes_per_s": slow.bandwidth_bytes_per_s,
                        "limit_bytes_per_s": slow.limit_bytes_per_s,
                        "bytes_per_step": slow.bytes_per_step,
                    },
                ),
            ),
        )
