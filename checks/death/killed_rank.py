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

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.finding import Fact, Finding, Refuted, Severity

if TYPE_CHECKING:
    from ddpdoctor.diagnosis.failures import Killed
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP703",
    name="killed-rank",
    stands_for="killed",
    severity={"run": Severity.ERROR, "log": Severity.ERROR},
    needs=frozenset({"ranks"}),
)


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the rank that was killed first."""
    from ddpdoctor.diagnosis.failures import killed_rank
    from ddpdoctor.diagnosis.wording import location_of, place, rank_list, verb

    killed = killed_rank(record)
    if killed is None:
        return
    basis = record.job.kind
    facts = []
    if killed.within is not None:
        did = f"rank {killed.rank} was inside {killed.within.signature.kind} at {place(killed.within.site.innermost)}"
        numbers = {"step": killed.within.step}
        text = f"{did}, step {killed.within.step:,}"
        facts.append(Fact(text=text, basis=basis, numbers=numbers, rank=killed.rank))
    elif killed.phase:
        did = f"rank {killed.rank} was last seen in {killed.phase.replace('_', ' ')}, step {killed.step:,}"
        facts.append(Fact(text=did, basis=basis, numbers={"step": killed.step}, rank=killed.rank))
    if killed.echoes:
        lost = f"{rank_list(killed.echoes)} {verb(killed.echoes, 'reports', 'report')} a lost connection, which follows"
        facts.append(Fact(text=lost, basis=basis))
    who = f"it was process {killed.pid}" + (f" on {killed.host}" if killed.host else "")
    facts.append(Fact(text=who, basis=basis, numbers={"pid": killed.pid}, rank=killed.rank))
    within = None if killed.within is None else killed.within.site.innermost
    location = location_of(within)
    yield CHECK.finding(
        basis,
        _title(killed)
        + ("" if killed.within is None else f" inside {killed.within.signature.kind} at {place(within)}"),
        remedy=_remedy(killed),
        locations=location,
        ranks=(killed.rank,),
        evidence=tuple(facts),
    )


def _title(killed: Killed) -> str:
    if killed.signal is None:
        return f"the process of rank {killed.rank} ended without an exception or an exit code"
    try:
        name = signal.Signals(killed.signal).name
    except ValueError:
        name = f"signal {killed.signal}"
    return f"rank {killed.rank} was killed by {name}"


def _remedy(killed: Killed) -> str:
    if killed.within is not None and killed.signal == signal.SIGABRT:
        return (
            "Read the message that this rank printed last, and compare what the others called there: kind, shape and "
            "dtype of a collective must be the same on every rank."
        )
    if killed.within is not None and killed.signal is None:
        return (
            "Find out what ended that process: the log of the scheduler or of the container, or a manual `kill`. It "
            "was "
            "waiting for the others in a collective."
        )
    if killed.signal in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE):
        return "Read the last lines that this rank printed, and look for the native call in its core dump."
    return (
        "Check whether the kernel killed it because memory ran out (`dmesg -T | grep -i 'killed process'`), and "
        "the memory limit of the container or the Slurm job."
    )
