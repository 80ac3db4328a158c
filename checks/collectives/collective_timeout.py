"""A collective timed out and ended the job.

What it finds
    The timeout of NCCL's watchdog or of gloo as the first failure: which collective timed out, and which ranks did not
    reach it. If the ranks' collectives show why they did not, that is reported instead.

Why it is bad
    The error names the ranks that waited. The rank that did not arrive has often printed nothing, and a longer timeout
    only makes the next wait longer.

Example
    if rank == 0:
        evaluate(model)                 # longer than the timeout
    loss.backward()

Remedy
    Look at what the absent rank did at that time. If it was legitimate work, divide it or give the group a longer
    timeout; if it was stuck, its stack shows where.

When it is wrong
    If the network failed, all ranks arrived and none could reach another: then no absent rank is named.

References
    https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html
    https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
"""

from ddpdoctor.check import Check
from ddpdoctor.finding import Severity

CHECK = Check(
    code="DDP308",
    name="collective-timeout",
    stands_for="timeout",
    severity={"run": Severity.ERROR, "log": Severity.ERROR},
    needs=frozenset({"ranks"}),
)

in_run = CHECK.judged_by("checks.collectives.divergences_run", "timed_out")
