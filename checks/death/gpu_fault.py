"""A GPU failed while the job ran.

What it finds
    In the logs: an event of the driver (Xid), or CUDA's error about ECC or a lost GPU. In a live run: a rank's GPU that
    the driver can no longer reach, a critical event (Xid) of the driver on it, or memory errors that could not be
    corrected, where they came during the run.

Why it is bad
    The rank on it ends with a CUDA error, or hangs; the others wait for it until their timeout, and what they print is
    about communication. Restarted on the same machine the job fails again.

Example
    the GPU of rank 3 is lost: the driver can no longer reach it

Remedy
    Take the machine out of service and restart from the last checkpoint elsewhere; reset or replace the GPU. Xid 13, 31
    and 43 come from the program: run it with CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer, to find the kernel.

When it is wrong
    Where another program on the same GPU caused the event.

References
    https://docs.nvidia.com/deploy/xid-errors/index.html
"""

from ddpdoctor.check import Check
from ddpdoctor.finding import Severity

CHECK = Check(
    code="DDP704",
    name="gpu-fault",
    stands_for="gpu-fault",
    severity={"run": Severity.ERROR, "log": Severity.ERROR},
    needs=frozenset({"gpus"}),
)


in_run = CHECK.judged_by("checks.death.failures_run", "gpu_faults")
