"""The ranks wait for one that is busy with long work.

What it finds
    Preprocessing of a data set (`dataset.map`) or generation in a loop (`model.generate`) that only the first rank
    does, while the others proceed to their next collective, in a script that keeps the default timeout. As advice, what
    the first rank of the job or of each node does alone without gradients: a loop over a loader, a data set or a
    folder, or sampling, where a model is fed what it has given; and a script that it starts between two steps and waits
    for. In a run: a wait of half the group's timeout or more; in a rehearsal an error when the timeout was reached (in
    a live run that is DDP308). As advice, in a live run: a wait that ended well and that was longer than the timeout of
    another group which the busy rank is in.

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

import msgspec

from ddpdoctor.check import Check, Script
from ddpdoctor.files import regex
from ddpdoctor.finding import Finding, Location, Severity
from ddpdoctor.source.events import Event, Guard, LoopAround
from ddpdoctor.source.interpreter.values import (
    ALL_RANKS,
    NONE,
    ExternalObject,
    Instance,
    SequenceValue,
    Value,
    options_of,
)
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.divergence import events_through, function_around, guard_of, reported_lines
from ddpdoctor.source.queries.training_loops import forwards_without_gradients, only_loader, takes_all_data
from ddpdoctor.source.ranks.ranks import FIRST_RANKS, numbers_in, ranks_text
from ddpdoctor.source.script.module import Module, descend, last_name, made_from

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
_SAMPLES = "Divide the samples between the ranks, or draw them from the checkpoint in a job of its own."
_START = "Start the program without waiting for it (subprocess.Popen), or divide its work between the ranks."
_DIVIDE = (
    "Divide the work between the ranks or do it before the job; or give init_process_group a timeout that covers it."
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report long work of the first rank with a collective behind it."""
    projection = whole_projection(script)
    yield from lone_work(projection)
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
        title,
        remedy=remedy,
        locations=(location, place, condition[1]),
        because=(condition, (f"the others wait in this {meeting.name}", place)),
        severity=severity,
    )


in_run = CHECK.judged_by(
    "checks.collectives.divergences_run",
    "long_waits",
    "Divide the work between the ranks or do it before the job; or give the group a timeout that covers it.",
)


# Evaluation, sampling and programs of the first rank, which the others wait for in their next collective.

_FEW_TURNS = 16
# A script that is run, and not in the background.
_SCRIPT = regex(r"(?:^|&&|;)\s*(?:\w+=\S*\s+)*(?:\S*/)?(?:python[\d.]*|(?:ba)?sh)\s+(?:-u\s+)?\S+\.(?:py|sh)\b[^&]*$")


class _Work(msgspec.Struct, frozen=True, eq=False):
    """What the first rank does alone, and what is said of it."""

    event: Event
    node: ast.AST
    place: Location
    does: str
    kept_from: str
    remedy: str


def lone_work(projection: Projection) -> Iterator[Finding]:
    """Such work, once for each rank test; none that other ranks do too, and none where nothing makes them wait."""
    meetings = [event for event in projection.synchronising if event.ranks == ALL_RANKS and not event.in_parent]
    hanging = reported_lines(projection) if meetings else frozenset()
    seen: set[ast.AST] = set()
    for work in _lone_work(projection) if meetings else ():
        event = work.event
        guard, meeting = guard_of(projection, event), _next_meeting(event, meetings)
        if guard is None or guard.guessed or meeting is None or {work.node, guard.node} & seen:
            continue
        if any((frame.file, frame.line) in hanging for frame in event.chain) or _leaves_behind(
            projection, guard, event
        ):
            continue
        seen |= {work.node, guard.node}
        text = f"`{guard.module.excerpt(guard.node)}` keeps the other ranks from {work.kept_from}"
        waited = f"{meeting.name} at line {meeting.location.line}"
        who = ranks_text(event.ranks) if len(numbers_in(event.ranks)) == 1 else "the first rank of each node"
        title = f"{who} {work.does} alone here while the others wait in {waited}"
        yield _suspected(title, work.place, (text, guard.location), meeting, work.remedy, Severity.ADVICE)


def _leaves_behind(projection: Projection, guard: Guard, event: Event) -> bool:
    """Return whether the rank is gone after its work, so that the others wait for ever."""
    for left in projection.exits:
        goes_on = isinstance(left.node, (ast.Break, ast.Continue)) or not left.ranks & event.ranks
        if left.ordinal > event.ordinal and left.module is guard.module and not goes_on:
            ifs = (around for around in left.module.ancestors(left.node) if isinstance(around, ast.If))
            if any(guard.node in descend(around) for around in ifs):
                return True
    return False


def _lone_work(projection: Projection) -> Iterator[_Work]:
    # One object a walk of a loop: a script that also runs without ranks does all of it in another walk.
    shared = {id(loop) for event in projection.events if event.ranks == ALL_RANKS for loop in event.loops}
    models = _whole_models(projection)
    forwards = list(forwards_without_gradients(projection))
    ranks_in: dict[ast.AST, int] = {}
    for forward in forwards:
        for around in forward.loops:
            # The other ranks may come to it by another arm: `print(test()) if first else test()`.
            ranks_in[around.node] = ranks_in.get(around.node, 0) | forward.ranks
    for forward in forwards:
        alone = forward.ranks in FIRST_RANKS
        own = [one for one in forward.loops if alone and id(one) not in shared and ranks_in[one.node] != ALL_RANKS]
        loop = next((loop for loop in own if takes_all_data(projection, loop)), None)
        if loop is not None:
            what = "a loader" if only_loader(projection, loop) is not None else "all data"
            place = loop.module.head_location(loop.node)
            yield _Work(forward, loop.node, place, "evaluates", f"this loop over {what}", _SHARE)
        elif own and _numbers(forward.receiver) & models:
            loop = own[-1]
            if not _has_few_turns(loop) and _is_fed_back(forward, loop):
                place = loop.module.head_location(loop.node)
                yield _Work(forward, loop.node, place, "samples", "the turns of this loop", _SAMPLES)
    for event in projection.in_course("call"):
        between_steps = any(id(loop) in shared and not loop.once for loop in event.loops)
        if not between_steps or event.ranks not in FIRST_RANKS:
            continue
        from ddpdoctor.source.queries.shell_commands import command_line

        if _SCRIPT.search(command_line(event)):
            yield _Work(event, event.node, event.location, "waits for a program", "this program", _START)


def _whole_models(projection: Projection) -> frozenset[int]:
    """Return the numbers of the DDP objects and of the models in them."""
    wraps = list(projection.of_kind("wrap"))
    inside = {number for wrap in wraps for number in _numbers(wrap.argument("module", 0))}
    return frozenset({wrap.ordinal for wrap in wraps} | inside)


def _numbers(value: Value | None) -> set[int]:
    return {one.number for one in options_of(value or NONE) if isinstance(one, (Instance, ExternalObject))}


def _has_few_turns(loop: LoopAround) -> bool:
    items = loop.iterable
    return loop.once or (isinstance(items, SequenceValue) and not items.open and len(items.values) < _FEW_TURNS)


def _is_fed_back(forward: Event, loop: LoopAround) -> bool:
    """Return whether a model is fed what the turn before has made of what it gave."""
    path = str(loop.module.path)
    lines = {frame.line for frame in forward.chain if path.endswith(frame.file)}
    for call in loop.module.index.within(loop.node, ast.Call):
        given = [*call.args, *(word.value for word in call.keywords)] if call.lineno in lines else []
        if any(call in made_from(argument, loop.node) for argument in given):
            return True
    return False


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
            if isinstance(node, ast.Call) and _is_of_method(node, "map") and len(node.args) == 1:
                return node, "preprocesses a data set"
            if isinstance(node, (ast.For, ast.While, ast.ListComp)):
                for inner in descend(node):
                    if isinstance(inner, ast.Call) and _is_of_method(inner, "generate"):
                        return inner, "generates for one sample after another"
    return None


def _is_of_method(call: ast.Call, name: str) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == name


def _meeting_behind(module: Module, node: ast.If, events: Sequence[Event]) -> Event | None:
    """Return the collective that the others come to meanwhile: further down, or in the next turn of a loop."""
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
