"""The ranks wait for one that is busy with long work.

What it finds
    Preprocessing of a data set (`dataset.map`) or generation in a loop (`model.generate`) that only the first rank
    does, while the others proceed to their next collective, in a script that keeps the default timeout. As advice, a
    loop over a loader without gradients that one rank runs alone. In a run: a wait of half the group's timeout or more;
    in a rehearsal an error when the timeout was reached (in a live run that is DDP308). As advice, in a live run: a
    wait that ended well and that was longer than the timeout of another group which the busy rank is in.

Why it is bad
    The others wait in that collective until the first rank arrives: all GPUs but one are idle. Once the work takes
    longer than the timeout of the group (10 minutes with NCCL, 30 with gloo), the job is ended, and that happens with
    the full data, not in a test with a small part of it.

Example
    if rank == 0:
        dataset = raw.map(tokenize)         # 25 minutes on the whole corpus
    dist.barrier()                          # NCCL gives up after 10

Remedy
    Divide the work between the ranks, or do it before the job. Where one rank must do it, pass
    timeout=timedelta(hours=2) to init_process_group.

When it is wrong
    Where the work is short, or its result is cached from an earlier run.

References
    https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.init_process_group
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from ddpdoctor.check import Check
from ddpdoctor.checks.collectives.long_wait_source import LongWait, long_waits
from ddpdoctor.finding import Fact, Finding, Location, Refuted, Severity
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import ALL_RANKS
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.divergence import reported_lines, sync_events
from ddpdoctor.source.queries.training_loops import evaluating_forwards, only_loader
from ddpdoctor.source.ranks.ranks import numbers_in
from ddpdoctor.source.script.script import Script

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

    Places = tuple[Location | None, ...]

CHECK = Check(
    code="DDP307",
    name="long-wait",
    stands_for="long-wait",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.WARNING),
    needs=frozenset({"ranks", "collectives"}),
    needs_live=frozenset({"groups", "step_tracks", "call_tracks"}),
    subjects=("collectives",),
    triggers=("distributed", "ccelerat"),
)

_SHARE = (
    "Divide the evaluation between the ranks with DistributedSampler(shuffle=False) and all-reduce counts and sums."
)
_DIVIDE = (
    "Divide the work between the ranks or do it before the job; or give init_process_group a timeout that covers it."
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report long work of the first rank with a collective behind it."""
    projection = whole_projection(script)
    for wait in lone_evaluations(projection):
        yield _suspected(wait, "", _SHARE, "keeps the other ranks from this loop over a loader", Severity.ADVICE)
    for wait in long_waits(projection):
        yield _suspected(wait, ", with the default timeout", _DIVIDE, "selects the first rank")


def _suspected(wait: LongWait, how: str, remedy: str, test: str, severity: Severity | None = None) -> Finding:
    collective, place = wait.collective, wait.collective_location
    return CHECK.finding(
        "source",
        f"{wait.what} here while the others wait in {collective} at line {place.line}{how}",
        remedy=remedy,
        locations=(wait.location, place, wait.condition_location),
        because=(
            (f"`{wait.condition}` {test}", wait.condition_location),
            (f"the others wait in this {collective}", place),
        ),
        severity=severity,
    )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the wait that came nearest to its timeout, or went beyond it; of a live run the longest of each group."""
    from ddpdoctor.checks.collectives import live_waits_run
    from ddpdoctor.diagnosis.divergence import long_waits
    from ddpdoctor.diagnosis.wording import duration_text, location_of, site_location

    if record.job.kind == "run":
        for lived, timeout_ns in live_waits_run.long_waits(record):
            title = f"{live_waits_run.wait_text(lived)}; the timeout is {duration_text(timeout_ns)}"
            places = (site_location(lived.site), site_location(lived.late_site))
            yield _finding(record, title, places, lived.late, lived.waited_ns, timeout_ns)
        yield from _unfit_timeouts(record)
        return
    wait = long_waits.longest_wait(record)
    if wait is not None:
        busy = None if wait.before is None else location_of(wait.before.line)
        places = (location_of(wait.turn.line), busy)
        found = _finding(record, long_waits.wait_text(wait), places, wait.late, wait.waited_ns, wait.timeout_ns)
        yield msgspec.structs.replace(found, severity=Severity.ERROR) if wait.timed_out else found


def _unfit_timeouts(record: RunRecord) -> Iterator[Finding]:
    """Report waits that another group would not have survived."""
    from ddpdoctor.checks.collectives.live_waits_run import unfit_timeouts, wait_text
    from ddpdoctor.diagnosis.wording import duration_text, group_name, site_location

    for wait, number in unfit_timeouts(record):
        group = record.groups[number]
        place = site_location(wait.site)
        name = group_name(group, record.job.world_size)
        yield CHECK.finding(
            "run",
            f"{wait_text(wait)}, and {name} would have timed out after {duration_text(group.timeout_ns)}",
            remedy=f"Give {name} a timeout well above {duration_text(wait.waited_ns)}.",
            severity=Severity.ADVICE,
            locations=place,
            ranks=wait.late,
            evidence=(
                Fact(
                    text=f"the longest wait was {duration_text(wait.waited_ns)}",
                    basis="run",
                    numbers={"waited_s": wait.waited_ns / 1e9, "timeout_s": group.timeout_ns / 1e9},
                    location=place,
                ),
            ),
        )


def _finding(
    record: RunRecord, title: str, places: Places, late: tuple[int, ...], waited_ns: int, timeout_ns: int
) -> Finding:
    from ddpdoctor.diagnosis.wording import duration_text

    return CHECK.finding(
        record.job.kind,
        title,
        remedy="Divide the work between the ranks or do it before the job; or give the group a timeout that covers it.",
        locations=tuple(place for place in places if place is not None),
        ranks=late,
        evidence=(
            Fact(
                text=f"the timeout of the group is {duration_text(timeout_ns)}",
                basis=record.job.kind,
                numbers={"waited_s": waited_ns / 1e9, "timeout_s": timeout_ns / 1e9},
                location=places[0],
            ),
        ),
    )


# Evaluation of a whole loader by one rank, which the others wait for in their next collective.


def lone_evaluations(projection: Projection) -> Iterator[LongWait]:
    """Such loops, one for each rank test; none that other ranks run too, and none where nothing makes them wait."""
    meetings = [event for event in sync_events(projection) if event.ranks == ALL_RANKS and not event.in_parent]
    forwards = tuple(evaluating_forwards(projection)) if meetings else ()
    shared = {loop.node for event in projection.events if event.ranks == ALL_RANKS for loop in event.loops}
    hanging = reported_lines(projection)
    seen: set[ast.AST] = set()
    for forward in forwards:
        ranks = numbers_in(forward.ranks)
        guard = next((guard for guard in forward.guards if guard.arm == forward.ranks and not guard.guessed), None)
        if len(ranks) != 1 or guard is None:
            continue
        own = (loop for loop in forward.loops if loop.node not in shared)
        loop = next((loop for loop in own if only_loader(projection, loop) is not None), None)
        meeting = _next_meeting(forward, meetings)
        if loop is None or meeting is None or {loop.node, guard.node} & seen:
            continue
        seen |= {loop.node, guard.node}
        place = loop.module.head_location(loop.node)
        if not any((frame.file, frame.line) in hanging for frame in forward.chain):
            yield LongWait(
                what=f"rank {ranks[0]} evaluates alone",
                location=place,
                condition=guard.module.excerpt(guard.node),
                condition_location=guard.location,
                collective=meeting.name,
                collective_location=meeting.location,
            )


def _next_meeting(forward: Event, meetings: Sequence[Event]) -> Event | None:
    """Return the collective that the others come to meanwhile: behind it, or in the next turn of a loop around both."""
    behind = next((event for event in meetings if event.ordinal > forward.ordinal), None)
    if behind is not None:
        return behind
    around = {loop.node for loop in forward.loops if not loop.once}
    return next((event for event in meetings if any(loop.node in around for loop in event.loops)), None)
