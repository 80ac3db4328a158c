"""A rank's GPU runs slower than it could.

What it finds
    In a live run: a GPU that is slowed down because it is too hot or its power supply is insufficient, in at least a
    quarter of the samples while it was busy; and one whose clock is more than 15% below that of the other ranks' GPUs
    of the same model (for 5%, `gpu-throttled = 0.95` under `[tool.ddpdoctor.thresholds]`). As advice: GPUs with a
    lowered power limit, if that costs a fifth of the clock rate.

Why it is bad
    Every step ends when its slowest rank ends: one GPU at two thirds of its clock slows down all of them, and the
    script shows nothing of it.

Example
    GPU 5 (rank 5): 91 °C, 1,110 MHz of 1,980 MHz, too hot

Remedy
    Look at the cooling and the power supply of that machine, or leave the GPU out; `nvidia-smi -q -d PERFORMANCE,CLOCK`
    shows the same figures. For a lowered limit: `nvidia-smi -pl`.

When it is wrong
    Where clocks or power limits were set on purpose. A power limit that is reached is not a finding by itself: every
    GPU that multiplies large matrices reaches it.

References
    https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html
"""

from ddpdoctor.check import Check
from ddpdoctor.finding import Severity

CHECK = Check(code="DDP409", name="gpu-throttled", severity={"run": Severity.WARNING}, needs=frozenset({"gpus"}))

in_run = CHECK.judged_by("checks.speed.steps_run", "throttled_gpus")
