"""An environment variable harms the job.

What it finds
    Debug settings that crash or slow the job (TORCH_DISTRIBUTED_DEBUG=DETAIL with gloo on torch 2.13,
    TORCH_NCCL_ENABLE_TIMING, CUDA_LAUNCH_BLOCKING, NCCL_P2P_DISABLE), NCCL's error handling switched off or combined
    with blocking waits, and a network interface that this machine does not have. Set outside or by the script.

Why it is bad
    Such variables outlive the debugging session that they were set for, in a shell profile or a job template. Nothing
    in the script shows them, and the job is slow, hangs where it should fail, or crashes before its first step.

Example
    export TORCH_NCCL_ASYNC_ERROR_HANDLING=0

Remedy
    Remove the variable from the job's environment.

When it is wrong
    If it was set on purpose for this run. NCCL's variables are checked only if a group uses NCCL.

References
    https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
"""

from ddpdoctor.check import Check
from ddpdoctor.finding import Severity

CHECK = Check(
    code="DDP509",
    name="unsafe-environment",
    severity={"rehearsal": Severity.WARNING, "run": Severity.WARNING},
    needs=frozenset({"ranks", "settings"}),
)

in_run = CHECK.judged_by("checks.launch.environment_run", "unsafe_variables")
