"""The ranks wait for each other in every step without need.

What it finds
    A barrier that every training step runs, of one micro-step or of several; in a live run it is advice as long as it
    takes less than 1% of the step, not counting the wait for the last rank. As advice: a loss or metric that every step
    all-reduces only to log it, and objects of Python that every step exchanges. Only the source shows what a sum is
    for; a rehearsal counts how often it runs, and refutes the finding where that is rare.

Why it is bad
    Backward already synchronises the ranks. An additional barrier keeps the fastest rank from running ahead and makes
    the CPU wait for the GPU, so that kernels are no longer queued in advance; a reduction for the log costs a round of
    latency per step. Objects are pickled, and read back from the GPU, in two collectives: the CPU waits for both.

Example
    for batch in loader:
        model(batch).mean().backward()
        optimizer.step()
        dist.barrier()

Remedy
    Remove the barrier. Reduce what is logged when it is logged, every hundred steps, or sum it up on each rank and
    reduce it once an epoch.

When it is wrong
    Where the loop measures the time of single steps, or each step needs the objects of the other ranks.

References
    https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from ddpdoctor.check import Check, RunRecord, Script
from ddpdoctor.finding import Finding, FoundInRun, Severity
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import ALL_RANKS, NONE, ExternalObject, tags_of
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.divergence import BARRIERS
from ddpdoctor.source.queries.job_kind import framework
from ddpdoctor.source.queries.shown_numbers import is_only_shown, unsettled
from ddpdoctor.source.queries.wrapped_models import innermost_loop, loop_nodes, reaches_unread

CHECK = Check(
    code="DDP313",
    name="barrier-in-hot-loop",
    stands_for="hot-barrier",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.WARNING),
    needs=frozenset({"backwards", "collectives", "forwards"}),
    needs_live=frozenset({"step_tracks", "call_tracks"}),
    advice_in_run=True,
    subjects=("collectives", "training"),
    triggers=("barrier", "wait_for_everyone", "reduce", "gather", "object_list"),
)
_REMEDY = "Remove it: DDP's backward synchronises the ranks in every step."


def _remedy(meeting: str) -> str:
    return _REMEDY if meeting == "backward" else f"Remove it: {meeting} makes the ranks meet in every step."


def in_source(script: Script) -> Iterator[Finding]:
    """Report barriers, and reductions for the log, in every training step."""
    for event, backward, meeting in every_step(whole_projection(script)):
        is_barrier = event.name in BARRIERS
        if is_barrier:
            title = f"every training step waits in {event.name}, though {meeting} synchronises the ranks already"
            remedy = _remedy(meeting)
        elif event.name in _OF_OBJECTS:
            title = f"every training step runs {event.name}, which pickles objects and makes the CPU wait"
            remedy = "Exchange them only in every hundredth step, or once per epoch."
        else:
            title = f"every training step runs {event.name} for a number that is only displayed"
            remedy = "Reduce it only in steps that log it, or once per epoch."
        yield CHECK.finding(
            title,
            remedy=remedy,
            locations=event.location,
            because=("this backward runs in the same iteration", backward.location),
            severity=None if is_barrier else Severity.ADVICE,
        )


def in_run(record: RunRecord) -> Iterator[FoundInRun]:
    """Report barriers that followed every training step, with what they cost where that is known; count reductions."""
    from ddpdoctor.checks.collectives.divergences_run import counted_reductions, hot_barriers, live_barriers

    barriers = live_barriers if record.job.kind == "run" else hot_barriers
    yield from CHECK.judged(record.job.kind, barriers(record), _REMEDY)
    if record.job.kind != "run":
        yield from counted_reductions(record)


_REDUCTIONS = frozenset({"all_reduce", "reduce", "gather"})
_OF_OBJECTS = frozenset({"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"})


def every_step(projection: Projection) -> Iterator[tuple[Event, Event, str]]:
    """Barriers, exchanges of objects, and reductions of what decides nothing, which run as often as a backward.

    Each with that backward, and with what brings the ranks together beside it: ``backward``, or another collective.
    """
    backwards = [event for event in projection.of_kind("backward") if event.loops]
    seen: set[ast.AST] = set()
    script = projection.machine.script
    for event in projection.of_kind("collective"):
        is_barrier, objects = event.name in BARRIERS, event.name in _OF_OBJECTS
        if event.node in seen or not event.loops or not (is_barrier or objects or event.name in _REDUCTIONS):
            continue
        if _in_a_handler(script, event):
            continue  # As where an attribute is made that was not there: not in every step.
        if not _of_all(projection, event) or not (is_barrier or objects or _is_of_the_batch(projection, event)):
            continue
        for backward in backwards:
            meeting = _meeting_beside(projection, event, backward)
            if meeting is not None and _as_often(projection, event, backward, is_barrier):
                if not (is_barrier or objects or is_only_shown(script, event)):
                    break
                seen.add(event.node)
                yield event, backward, meeting
                break


def _in_a_handler(script: Script, event: Event) -> bool:
    """Return whether a call, or one that leads to it, stands in an ``except`` clause inside of its innermost loop."""
    by_file = {str(module.path): module for module in script.modules}
    loop, home = event.loops[-1].node, str(event.loops[-1].module.path)
    for frame in event.chain:
        module = by_file.get(frame.file)
        holds_loop = frame.file == home and loop.lineno <= frame.line <= (loop.end_lineno or 0)  # type: ignore[attr-defined]
        if module is None:
            continue
        for handler in module.index.of(ast.ExceptHandler):
            inside = handler.lineno <= frame.line <= (handler.end_lineno or handler.lineno)
            # A function that is defined there runs elsewhere.
            own = frame.function.rpartition(".")[2] == getattr(module.body_around(handler), "name", "<module>")
            if inside and own and (not holds_loop or handler.lineno > loop.lineno):  # type: ignore[attr-defined]
                return True
        if holds_loop:
            return False
    return False


def _of_all(projection: Projection, event: Event) -> bool:
    """Return whether all ranks come to a call, at once or by a test of the rank whose arms all lead to it."""
    if event.ranks == ALL_RANKS:
        return not event.guards
    ranks = 0
    for one in projection.of_kind("collective"):
        if one.node is event.node and len(one.guards) == 1 and one.guards[0].node is event.guards[0].node:
            ranks |= one.ranks
    return ranks == ALL_RANKS


def _meeting_beside(projection: Projection, event: Event, backward: Event) -> str | None:
    """Return what makes all ranks meet in the turn of a backward; None where no DDP and no reduction does."""
    wrappers = ("DataParallel", "fully_shard")  # Of apex, and of FSDP.
    other = any(event.name.endswith(wrappers) for event in projection.of_kind("object", "call"))
    loop = backward.loops[-1].node
    wrapped = other or any(projection.of_kind("wrap")) or framework(projection.machine.script)
    if wrapped and not _bypasses(projection, loop):
        return "backward"
    others = (
        one for one in projection.of_kind("collective") if one.name not in BARRIERS and one.node is not event.node
    )
    beside = (one for one in others if one.ranks == ALL_RANKS and any(around.node is loop for around in one.loops))
    return next((one.name for one in beside), None)


def _bypasses(projection: Projection, loop: ast.AST) -> bool:
    """Return whether a loop takes the module out of a DDP object and never calls that object: its backward averages
    nothing, and no rank waits in it.
    """
    inside = [event for event in projection.events if any(around.node is loop for around in event.loops)]
    if any(event.kind == "ddp-forward" for event in inside):
        return False
    taken = [event.receiver for event in inside if event.name == "ddp.module" and event.gradients]
    objects = [one for one in taken if isinstance(one, ExternalObject)]
    # Who is given the object may call it.
    return bool(objects) and not any(reaches_unread(projection, one) for one in objects)


def _as_often(projection: Projection, event: Event, backward: Event, is_barrier: bool) -> bool:
    """Return whether a collective runs in every turn of a backward's loop; a barrier may be repeated in a turn."""
    steps = _loops_of_step(projection, backward)
    found = [loop for loop in event.loops if loop.node in steps]
    if not found or found[-1].once or not (is_barrier or found[-1] is event.loops[-1]):
        return False
    # A barrier under a setting may be there for a measurement, which is off; a job of several ranks is what it is for.
    around, beside = (
        unsettled(projection.machine.script, one.undecided, found[-1].node, any_setting=not is_barrier)
        for one in (event, backward)
    )
    return around == beside[: len(around)]


def _loops_of_step(projection: Projection, backward: Event) -> Sequence[ast.AST]:
    """Return the innermost loop around a backward, and the one around that where its turns are the parts of a step.

    They are where the optimizer steps, and its gradients are cleared, in the outer loop only.
    """
    loops = loop_nodes(backward)
    done = {
        name: {innermost_loop(event) for event in projection.of_kind("training") if event.name == name}
        for name in ("step", "zero_grad")
    }
    if len(loops) > 1 and all(loops[-2] in places and loops[-1] not in places for places in done.values()):
        return loops[-2:]
    return loops[-1:]


def _is_of_the_batch(projection: Projection, event: Event) -> bool:
    """Return whether a number that the model or a batch has given is reduced, or a tensor that is made in each turn."""
    reduced = event.positional[0] if event.positional else NONE
    made = projection.machine.events.get(reduced.number) if isinstance(reduced, ExternalObject) else None
    if made is not None and made.name.endswith("Tensor"):
        return innermost_loop(made) is innermost_loop(event)
    return any(kind in ("ddp", "batch") for kind, _ in tags_of(reduced))
