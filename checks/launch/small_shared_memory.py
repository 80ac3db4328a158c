"""The shared memory of the machine or container is too small for the loader workers.

What it finds
    A worker of a DataLoader that died of a bus error, or torch's message that shared memory is insufficient. In a live
    run, before that: ranks that use a /dev/shm of which less than a tenth and less than 256 MiB is free.

Why it is bad
    Workers pass their batches through /dev/shm, which has 64 MB in a Docker container by default. A
    worker that cannot write there is killed in the middle of an epoch; the other ranks then wait for its rank.

Example
    docker run --gpus all image torchrun train.py       # 64 MB for all ranks' workers

Remedy
    Start the container with --ipc=host or a larger --shm-size (in Kubernetes: an emptyDir of medium Memory at
    /dev/shm), or use fewer workers and smaller batches.

When it is wrong
    Where the worker died of a bus error of its own, for instance in a memory-mapped file that was cut short.

References
    https://docs.pytorch.org/docs/stable/multiprocessing.html#sharing-strategies
"""

from ddpdoctor.check import Check
from ddpdoctor.finding import Severity

CHECK = Check(
    code="DDP507",
    name="small-shared-memory",
    stands_for="shared-memory",
    severity=dict.fromkeys(("rehearsal", "run", "log"), Severity.WARNING),
    needs=frozenset({"ranks"}),
)
_REMEDY = "Start the container with --ipc=host or a larger --shm-size, or use fewer workers."

in_run = CHECK.judged_by("checks.launch.environment_run", "full_shared_memory", _REMEDY)
