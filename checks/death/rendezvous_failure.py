"""The rendezvous failed.

What it finds
    A rendezvous address that was in use, a store that could not be reached, or ranks that did not arrive: shown by the
    exception of a rank or of the launcher, and in a live run by a minute in init_process_group.

Why it is bad
    The job does not start. Until the timeout (15 to 30 minutes) it looks as if it were loading.

Example
    torchrun --nnodes=2 --node-rank=0 ...       # and on the second node --node-rank=0 as well

Remedy
    The same MASTER_ADDR, MASTER_PORT and WORLD_SIZE on all nodes, a different node rank for each, and a free port.

When it is wrong
    If nodes are still booting.

References
    https://docs.pytorch.org/docs/stable/elastic/rendezvous.html
    https://docs.pytorch.org/docs/stable/distributed.html#environment-variable-initialization
"""

from ddpdoctor.check import Check
from ddpdoctor.finding import Severity

CHECK = Check(
    code="DDP705",
    name="rendezvous-failure",
    stands_for="no-rendezvous",
    severity={"run": Severity.ERROR, "log": Severity.ERROR},
    needs=frozenset({"ranks", "waits"}),
)


in_run = CHECK.judged_by("diagnosis.failures", "failed_rendezvous")
