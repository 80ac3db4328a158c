"""NCCL failed.

What it finds
    An error of NCCL's own that ended a rank: its class, the first rank that raised it, and its usual cause. A lost peer
    is reported only if no rank ended for another reason.

Why it is bad
    Every rank prints pages of the same text, and the one line that gives the reason is on one rank only.

Example
    RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:1269, unhandled system error, NCCL version 2.21.5

Remedy
    NCCL_DEBUG=WARN makes NCCL say what failed. System error: the network interface (NCCL_SOCKET_IFNAME) or /dev/shm.
    CUDA error: a kernel before it. Internal error: different versions on the nodes. Invalid usage: two ranks on one
    GPU.

When it is wrong
    The cause is the usual one of its class, not a proof.

References
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/types.html#ncclresult-t
"""

from ddpdoctor.check import Check
from ddpdoctor.finding import Severity

CHECK = Check(
    code="DDP701",
    name="nccl-error",
    stands_for="nccl-error",
    severity=dict.fromkeys(("rehearsal", "run", "log"), Severity.ERROR),
    needs=frozenset({"ranks"}),
)


in_run = CHECK.judged_by("checks.death.failures_run", "nccl_errors")
