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

from ddpdoctor.check import Check
from ddpdoctor.finding import Severity

CHECK = Check(
    code="DDP408",
    name="slow-link",
    severity={"run": Severity.WARNING},
    needs=frozenset({"step_tracks", "call_tracks", "gpus"}),
)

in_run = CHECK.judged_by("checks.speed.steps_run", "slow_links")
