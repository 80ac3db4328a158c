"""One rank exited while the others wait for it.

What it finds
    A rank that ended (its script returned, called sys.exit, or was killed by a signal) while other ranks wait in a
    collective that it never entered. In the source: something that only some ranks made, and that is None on the
    others, is used by all of them: an attribute or an item of it, arithmetic with it, a loop over it. Likewise a
    variable or an attribute that only some ranks ever give a value.

Why it is bad
    The others hang until the timeout, or fail with "Connection closed by peer", which hides which rank left first.

Example
    if not torch.isfinite(loss):
        sys.exit(1)                     # only the rank with the bad batch leaves

    writer = SummaryWriter() if rank == 0 else None
    writer.add_scalar("loss", loss)     # AttributeError on all ranks but 0

Remedy
    Decide together: all-reduce the reason for leaving, so that all ranks leave in the same step. What one rank has,
    use on that rank alone, or broadcast it first.

When it is wrong
    Where the launcher is meant to restart the job after one rank has left (elastic training).

References
    https://docs.pytorch.org/docs/stable/elastic/run.html
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check, Script
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import NONE, RANKS, on_rank
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.queries.job_kind import is_distributed
from ddpdoctor.source.ranks.ranks import ranks_text
from ddpdoctor.source.torch_model.recorded_calls import ABSENT, UNASSIGNED

if TYPE_CHECKING:
    from ddpdoctor.diagnosis.divergence.divergence import Divergence

CHECK = Check(
    code="DDP306",
    name="early-exit",
    stands_for="early-exit",
    severity={"source": Severity.WARNING, "rehearsal": Severity.ERROR, "run": Severity.ERROR, "log": Severity.ERROR},
    needs=frozenset({"ranks", "collectives"}),
    subjects=("job",),
    triggers=("rank", "RANK", "main_process", "master"),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report the first use, in each function, of what is None on some of the ranks that come there."""
    projection = whole_projection(script)
    seen: set[tuple[str, str, str]] = set()
    for event in projection.in_course("call") if is_distributed(projection) else ():
        if event.name not in (ABSENT, UNASSIGNED):
            continue
        name = event.module.excerpt(event.node)
        place = (str(event.module.path), event.function, name)
        if place not in seen:
            seen.add(place)
            absent, there = _parted(event)
            s = "s" if there.bit_count() == 1 else ""
            title = f"only {ranks_text(there)} give{s} `{name}` a value: {ranks_text(absent)} fail here"
            if event.name == ABSENT:
                goes = f"only {ranks_text(there)} go{'es' if s else ''} on"
                title = f"`{name}` is None on {ranks_text(absent)}, where this fails, and {goes}"
            remedy = f"Use it on {ranks_text(there)} only, or give it to all ranks first, as "
            remedy += "dist.broadcast_object_list does."
            if absent.bit_count() < there.bit_count():
                remedy = f"Give it a value on {ranks_text(absent)} as well."
            yield CHECK.finding(
                title,
                remedy=remedy,
                locations=event.location,
                because=(f"this call chain leads {ranks_text(event.ranks)} here", event),
            )


def _parted(event: Event) -> tuple[int, int]:
    """Return the masks of the ranks that have None, or nothing, and of those that have something."""
    value = event.positional[0]
    here = [rank for rank in RANKS if event.ranks >> rank & 1]
    absent = sum(1 << rank for rank in here if on_rank(value, rank) == NONE)
    return absent, event.ranks & ~absent


def _remedy(divergence: Divergence) -> str:
    if any(turn.action == "signalled" and turn.rank == divergence.culprit for turn in divergence.turns):
        return (
            "Find out what killed it: the kernel when memory ran out (`dmesg | grep -i oom`), the scheduler, or the "
            "script itself."
        )
    return (
        "Let all ranks leave together: all-reduce the reason for leaving first, or run the missing collectives on the "
        "rank that leaves."
    )


in_run = CHECK.reported_by("diagnosis.divergence_kind", "diverged", _remedy)
in_log = CHECK.reported_by("diagnosis.logs.findings", "from_dead_job", _remedy)
