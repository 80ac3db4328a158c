"""CUDA_VISIBLE_DEVICES is set after CUDA was initialised.

What it finds
    An assignment to os.environ["CUDA_VISIBLE_DEVICES"] that comes, in the order of execution of one process, after
    something that initialises CUDA: a tensor or module on the GPU, set_device, torch.cuda.synchronize.

Why it is bad
    CUDA reads the variable once, when it is initialised. Set later it has no effect and no error either: every process
    still sees all GPUs, and where each was to see its own as GPU 0, all of them work on the same one.

Example
    model = Net().cuda()
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]

Remedy
    Set it before the first use of CUDA, best in the shell or before torch is imported; or leave it and call
    torch.cuda.set_device.

When it is wrong
    Where the variable is meant for child processes that are started later.

References
    https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#cuda-environment-variables
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check, Script
from ddpdoctor.checks.launch.missing_set_device import late_visibilities
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.projection import whole_projection

CHECK = Check(
    code="DDP512",
    name="late-cuda-visible-devices",
    severity={"source": Severity.WARNING},
    triggers=("CUDA_VISIBLE_DEVICES",),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report assignments to CUDA_VISIBLE_DEVICES that come too late."""
    for setting, earlier in late_visibilities(whole_projection(script)):
        yield CHECK.finding(
            "CUDA_VISIBLE_DEVICES is set after this process initialised CUDA, and no longer has an effect",
            remedy="Move the assignment before the first use of CUDA, or choose the GPU with torch.cuda.set_device.",
            locations=setting.location,
            because=("CUDA is initialised here", earlier),
        )
