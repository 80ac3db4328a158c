"""An address, a port or a number of ranks in the code overrides the launcher's.

What it finds
    Constants assigned to MASTER_ADDR, MASTER_PORT, WORLD_SIZE or RANK, and a constant tcp:// address, in a script that
    takes its rank from a launcher's environment. In a run: a value other than the launcher's, and a port in use.

Why it is bad
    torchrun chooses address and port and passes them to all ranks. Nothing listens on a port that the script chooses,
    so init_process_group waits until its timeout; localhost is a different machine on each node; and two jobs on one
    machine compete for the same port.

Example
    os.environ["MASTER_PORT"] = "29500"
    dist.init_process_group("nccl", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))

Remedy
    Leave the variables alone under a launcher. For a script that runs without one as well, use
    os.environ.setdefault(...), which keeps what is there.

When it is wrong
    If your own launcher leaves these variables to the script. Scripts that start their ranks with
    mp.spawn need them and are excluded, as are scripts for Slurm or MPI.

References
    https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check, Script
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.queries.rendezvous import fixed_rendezvous

CHECK = Check(
    code="DDP504",
    name="hard-coded-rendezvous",
    stands_for="port-in-use",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.WARNING),
    needs=frozenset({"ranks", "waits", "settings"}),
    subjects=("job",),
    triggers=("init_process_group",),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report constants over the launcher's variables."""
    for event, what, value, is_mild in fixed_rendezvous(whole_projection(script)):
        if what == "init_method":
            title = f"the launcher's ranks have their rendezvous at {value}, an address of the script"
            remedy = "Omit init_method: the launcher's MASTER_ADDR and MASTER_PORT are then used."
        elif what == "world_size":
            title = f"the group is created for {value} ranks, however many the launcher starts"
            remedy = "Omit world_size, or take it from the launcher's environment."
        else:
            title = f"{what} is set to {value!r} in the code, overriding the launcher"
            remedy = f'Remove the line, or write os.environ.setdefault("{what}", "{value}").'
        yield CHECK.finding(
            title,
            remedy=remedy,
            locations=event.location,
            because=(("this call chain leads to it", event),) if len(event.chain) > 1 else (),
            severity=Severity.ADVICE if is_mild else None,
        )


in_run = CHECK.judged_by("checks.launch.environment_run", "misled_ranks")
