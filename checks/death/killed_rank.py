"""The process of one rank was killed.

What it finds
    The first rank whose process ended without an exception and without an exit while the others continued: by SIGKILL,
    SIGSEGV, SIGABRT, SIGBUS, or by an unreported signal. Processes that all ended together were ended by their launcher
    or the user, which is not a finding.

Why it is bad
    The other ranks report a lost connection or a timeout, and the launcher often names one of them as the root cause.

Example
    rank 3 loads a shard of 200 GB into a list, and the kernel's OOM killer ends it

Remedy
    After SIGKILL, or without a known signal: `dmesg -T | grep -i "killed process"`, and the memory limit of the
    container or the Slurm job. After SIGSEGV or SIGABRT: the last lines that the rank printed, and its core dump.

When it is wrong
    If that process was killed on purpose.

References
    https://docs.pytorch.org/docs/stable/elastic/errors.html
    https://docs.kernel.org/admin-guide/mm/concepts.html
"""

from ddpdoctor.check import Check
from ddpdoctor.finding import Severity

CHECK = Check(
    code="DDP703",
    name="killed-rank",
    stands_for="killed",
    severity={"run": Severity.ERROR, "log": Severity.ERROR},
    needs=frozenset({"ranks"}),
)

in_run = CHECK.judged_by("diagnosis.failures", "killed_rank")
