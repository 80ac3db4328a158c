"""Forked processes use CUDA, which their parent has initialised.

What it finds
    In a run: a forked process, such as a worker of a DataLoader or a rank started with Process(target=...), that puts a
    tensor on a GPU after its parent has, that failed for this reason, or that called a collective of its parent's
    process group. Processes are forked by default on Linux before Python 3.14.

Why it is bad
    CUDA does not survive a fork: the processes fail with "Cannot re-initialize CUDA in forked subprocess". Where it
    does not fail, because the parent has not touched CUDA yet, each worker of each rank holds a context of several
    hundred megabytes on the GPU. A process group does not survive a fork either: a collective in a worker hangs.

Example
    def __getitem__(self, index):
        return self.images[index].cuda()

Remedy
    Return CPU tensors from the data set, pin them (pin_memory=True), and move the batch in the training loop with
    non_blocking=True. Start ranks with torch.multiprocessing.spawn or torchrun.

When it is wrong
    No case is known: the process has done it, or CUDA says it itself.

References
    https://docs.pytorch.org/docs/stable/notes/multiprocessing.html#cuda-in-multiprocessing
    https://docs.pytorch.org/docs/stable/data.html#multi-process-data-loading
"""

from ddpdoctor.check import Check
from ddpdoctor.finding import Severity

CHECK = Check(
    code="DDP511",
    name="fork-after-cuda",
    stands_for="cuda-after-fork",
    severity=dict.fromkeys(("rehearsal", "run"), Severity.WARNING),
    needs=frozenset({"ranks", "forked_uses", "device_uses"}),
)

in_run = CHECK.judged_by(
    "checks.launch.environment_run",
    "broken_forks",
    "Return CPU tensors, with pin_memory=True in the loader, and move the batch in the training loop.",
)
