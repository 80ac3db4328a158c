"""A GPU computes for less than half of the training.

What it finds
    In a live run: GPUs whose utilisation, without the time in which only communication kernels ran, is below 50% over
    at least 20 s of training steps, where neither waiting for data nor exposed communication is the reason. Set a limit
    other than 50% with `idle-gpu = 0.3` under `[tool.ddpdoctor.thresholds]`.

Why it is bad
    The job pays for idle hardware. Usually the GPU waits for Python: many small kernels that are launched
    one by one, results that are read back in every step (.item(), printing), work on the CPU between the phases, or
    explicit collectives. A GPU that waits for other ranks in a kernel of NCCL still reads as 100% busy, so that figure
    alone says nothing.

Example
    for x, y in loader:                     # 3 ms of kernels a step, 9 ms of Python
        loss = model(x).mean() + sum(p.abs().sum() for p in model.parameters())

Remedy
    Larger batches, torch.compile (or CUDA graphs) against the cost of launching, no reading of results in every step
    (DDP406), and the work that the CPU does between the steps in the loader's workers.

When it is wrong
    Where the model is too small to fill the GPU and the time of a step does not matter.

References
    https://docs.nvidia.com/deploy/nvml-api/structnvmlUtilization__t.html
    https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html
"""

from ddpdoctor.check import Check
from ddpdoctor.finding import Severity

CHECK = Check(
    code="DDP405", name="idle-gpu", severity={"run": Severity.WARNING}, needs=frozenset({"gpus", "step_tracks"})
)

in_run = CHECK.judged_by("checks.speed.steps_run", "idle_gpus")
