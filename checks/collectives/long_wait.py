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
from ddpdoctor.files import regex
from ddpdoctor.finding import Finding, Location, Refuted, Severity
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import ALL_RANKS
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.divergence import events_through, function_around, reported_lines
from ddpdoctor.source.queries.training_loops import evaluating_forwards, only_loader
from ddpdoctor.source.ranks.ranks import numbers_in
from ddpdoctor.source.script.module import Module, descend, last_name
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
    yield from lone_evaluations(projection)
    yield from long_waits(projection)


def _suspected(
    title: str,
    location: Location,
    condition: tuple[str, Location],
    meeting: Event,
    remedy: str,
    severity: Severity | None = None,
) -> Finding:
    """Return the finding that ranks wait in a collective meanwhile; ``condition`` says what the others do not pass."""
    place = meeting.location
    return CHECK.finding(
        "source",
        title,
        remedy=remedy,
        locations=(location, place, condition[1]),
        because=(condition, (f"the others wait in this {meeting.name}", place)),
        severity=severity,
    )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the wait that came nearest to its timeout, or went beyond it; of a live run the longest of each group."""
    from ddpdoctor.checks.collectives import waits_run
    from ddpdoctor.diagnosis.divergence import long_waits
    from ddpdoctor.diagnosis.wording import duration_text, location_of, site_location

    if record.job.kind == "run":
        for lived, timeout_ns in waits_run.long_waits(record):
            title = f"{waits_run.wait_text(lived)}; the timeout is {duration_text(timeout_ns)}"
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
    from ddpdoctor.checks.collectives.waits_run import unfit_timeouts, wait_text
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
            because=(
                (
                    f"the longest wait was {duration_text(wait.waited_ns)}",
                    place,
                    {"waited_s": wait.waited_ns / 1e9, "timeout_s": group.timeout_ns / 1e9},
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
        locations=places,
        ranks=late,
        because=(
            (
                f"the timeout of the group is {duration_text(timeout_ns)}",
                places[0],
                {"waited_s": waited_ns / 1e9, "timeout_s": timeout_ns / 1e9},
            ),
        ),
    )


# Evaluation of a whole loader by one rank, which the others wait for in their next collective.


def lone_evaluations(projection: Projection) -> Iterator[Finding]:
    """Such loops, one for each rank test; none that other ranks run too, and none where nothing makes them wait."""
    meetings = [event for event in projection.synchronising if event.ranks == ALL_RANKS and not event.in_parent]
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
            text = f"`{guard.module.excerpt(guard.node)}` keeps the other ranks from this loop over a loader"
            waited = f"{meeting.name} at line {meeting.location.line}"
            title = f"rank {ranks[0]} evaluates alone here while the others wait in {waited}"
            yield _suspected(title, place, (text, guard.location), meeting, _SHARE, Severity.ADVICE)


def _next_meeting(forward: Event, meetings: Sequence[Event]) -> Event | None:
    """Return the collective that the others come to meanwhile: behind it, or in the next turn of a loop around both."""
    behind = next((event for event in meetings if event.ordinal > forward.ordinal), None)
    if behind is not None:
        return behind
    around = {loop.node for loop in forward.loops if not loop.once}
    return next((event for event in meetings if any(loop.node in around for loop in event.loops)), None)


# Long work of the first rank that the other ranks wait for in their next collective.

_FIRST_RANK = regex(
    r"rank\w*(\(\))? == 0\b|rank\w*\"\]\)? == |not \w*rank\b|is_main|is_master|main_process|master_process"
    r"|is_rank_?(0|zero)|RANK.* == "
)


# Methods that take as long as there is data.
_LONG = frozenset({"map", "generate"})


def long_waits(projection: Projection) -> Iterator[Finding]:
    """Generation and preprocessing on the first rank, in a script that keeps the default timeout."""
    events = [event for event in projection.synchronising if event.ranks == ALL_RANKS and not event.in_parent]
    set_up = (event for event in projection.of_kind("collective") if event.name == "init_process_group")
    if any("timeout" in event.named for event in set_up):
        return
    for module in projection.machine.script.modules if events else ():
        if not any(last_name(call.func) in _LONG for call in module.index.of(ast.Call)):
            continue
        for node in module.index.of(ast.If):
            if _FIRST_RANK.search(module.excerpt(node.test, 1_000)) and not _negated(node.test):
                work = _long_work(node.body)
                waiting = _meeting_behind(module, node, events) if work is not None else None
                if work is not None and waiting is not None:
                    text = f"`{module.excerpt(node.test)}` selects the first rank"
                    condition = (text, module.location(node.test))
                    waited = f"{waiting.name} at line {waiting.location.line}, with the default timeout"
                    title = f"the first rank {work[1]} here while the others wait in {waited}"
                    yield _suspected(title, module.location(work[0]), condition, waiting, _DIVIDE)


def _negated(test: ast.expr) -> bool:
    return any(
        isinstance(inner, ast.NotEq)
        or (isinstance(inner, ast.UnaryOp) and isinstance(inner.op, ast.Not) and "main" in ast.unparse(inner.operand))
        for inner in descend(test)
    )


def _long_work(body: Sequence[ast.stmt]) -> tuple[ast.Call, str] | None:
    """Return a call that takes as long as there is data: ``dataset.map(...)``, or ``model.generate(...)`` in a loop."""
    for statement in body:
        for node in descend(statement):
            receiver = _receiver_of(node, "map")
            if receiver is not None and isinstance(node, ast.Call) and len(node.args) == 1:
                return node, "preprocesses a data set"
            if isinstance(node, (ast.For, ast.While, ast.ListComp)):
                for inner in descend(node):
                    if isinstance(inner, ast.Call) and _receiver_of(inner, "generate") is not None:
                        return inner, "generates for one sample after another"
    return None


def _receiver_of(node: ast.AST, method: str) -> str | None:
    """Return the source of what a method is called on; None when the node is no call of that method."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method:
        return ast.unparse(node.func.value)
    return None


def _meeting_behind(module: Module, node: ast.If, events: Sequence[Event]) -> Event | None:
    """Return the collective that the others come to meanwhile: further down in the function, or in the next turn of a
    loop.
    """
    if any(events_through(events, module, node.lineno, node.end_lineno or node.lineno)):
        return None
    function = function_around(module, node)
    last = getattr(function, "end_lineno", None) or len(module.lines)
    behind = next(events_through(events, module, (node.end_lineno or node.lineno) + 1, last), None)
    if behind is not None:
        return behind
    for around in module.ancestors(node):
        if around is function:
            break
        if isinstance(around, (ast.For, ast.While)):
            return next(events_through(events, module, around.lineno, node.lineno), None)
    return None
