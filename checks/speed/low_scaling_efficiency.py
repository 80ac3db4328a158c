"""Throughput scales poorly with the number of ranks.

What it finds
    In a live run that has a run on one rank to compare with: throughput below 90% of that of one rank times the number
    of ranks. `ddpdoctor profile --nproc 1 train.py` records the run on one rank, and prints where; `ddpdoctor profile
    --one-rank RUN train.py` compares with it.

Why it is bad
    The difference is paid for and lost. It grows with the number of ranks.

Example
    1 rank: 410 samples/s; 8 ranks: 2,100 samples/s, which is 64% of 3,280

Remedy
    The other figures show what takes the time: exposed communication, waiting for a straggler, waiting for data
    (one disk, or one set of cores, that all ranks share).

When it is wrong
    If the single rank had a different batch size, other data or a different GPU.

References
    https://docs.pytorch.org/docs/stable/notes/ddp.html
"""

from ddpdoctor.check import Check
from ddpdoctor.finding import Severity

CHECK = Check(
    code="DDP410",
    name="low-scaling-efficiency",
    severity={"run": Severity.WARNING},
    needs=frozenset({"step_tracks", "call_tracks"}),
)

in_run = CHECK.judged_by("diagnosis.performance.run_comparison", "lost_scaling")
