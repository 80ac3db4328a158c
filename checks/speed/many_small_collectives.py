"""Every step reduces many small tensors, each by a collective of its own.

What it finds
    In the source, an all_reduce, reduce or broadcast that waits for each parameter, gradient or buffer of a model by
    itself, in every training step. In a rehearsal, a line that runs eight collectives or more a step, one for each turn
    of a loop, with less than a megabyte in each; in a live run also what they cost, and where that is a twentieth of
    the step or more, beside waiting for the last rank, it is a warning.

Why it is bad
    A small collective takes as long as its latency, tens of microseconds within a node and more between nodes, however
    few bytes it carries; a hundred of them one after the other often take longer than the computation of the step. DDP
    reduces gradients in buckets of 25 MB while backward still runs.

Example
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)

Remedy
    Flatten the tensors, concatenate them, reduce that once, and copy the parts back; or leave gradients to
    DistributedDataParallel. Numbers for the log fit into one tensor, too.

When it is wrong
    If the loop goes over a few large tensors only; a rehearsal or a live run clears that up.

References
    https://docs.pytorch.org/docs/stable/notes/ddp.html
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.check import Check, RunRecord, Script
from ddpdoctor.finding import Finding, FoundInRun, Severity
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import FALSE, constant
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.shown_numbers import unsettled
from ddpdoctor.source.queries.wrapped_models import innermost_loop, wrap_numbers
from ddpdoctor.source.script.module import descend, last_name, origins_of

CHECK = Check(
    code="DDP411",
    name="many-small-collectives",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ADVICE),
    needs=frozenset({"backwards", "collectives"}),
    needs_live=frozenset({"step_tracks", "call_tracks"}),
    subjects=("collectives", "training"),
    triggers=("reduce", "broadcast"),
)
_REMEDY = (
    "Join them in one tensor, reduce that once, and copy the parts back; gradients are reduced so by "
    "DistributedDataParallel, beside backward."
)
_KINDS = frozenset({"all_reduce", "reduce", "broadcast"})
# What has an item for each parameter or buffer of a model.
_OF_MODEL = frozenset({"parameters", "named_parameters", "buffers", "named_buffers", "state_dict"})
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def in_source(script: Script) -> Iterator[Finding]:
    """Report collectives that every training step runs for each parameter or buffer."""
    for event, backward in _for_each_tensor(whole_projection(script)):
        yield CHECK.finding(
            f"every training step runs a blocking {event.name} for each tensor of the model by itself",
            remedy=_REMEDY,
            locations=event.location,
            because=("this backward runs in the same iteration", backward.location),
        )


def in_run(record: RunRecord) -> Iterator[FoundInRun]:
    """Report lines that run many small collectives a step, and clear those that run few, or carry much."""
    from ddpdoctor.checks.speed.steps_run import live_lines, rehearsed_lines

    lines = live_lines if record.job.kind == "run" else rehearsed_lines
    yield from CHECK.judged(record.job.kind, lines(record), _REMEDY)


def _for_each_tensor(projection: Projection) -> Iterator[tuple[Event, Event]]:
    """Yield collectives in a loop over what a model holds, in the turn of a backward."""
    backwards = [event for event in projection.of_kind("backward") if event.loops]
    seen: set[ast.AST] = set()
    for event in projection.of_kind("collective"):
        if event.name not in _KINDS or event.node in seen or constant(event.named.get("async_op", FALSE)) is not False:
            continue
        if any(
            "coalescing" in str(getattr(context.value, "name", "")) or _coalesces(context.node)
            for context in event.contexts
        ):
            continue
        inner = _loop_over_model(event)
        beside = next(
            (one for one in backwards if inner is not None and _in_one_turn(projection, event, one, inner)), None
        )
        # Of a DDP model they are reduced a second time, and that is another finding.
        again = beside is not None and wrap_numbers(beside.receiver) and "grad" in ast.unparse(event.node)
        if beside is not None and not again:
            seen.add(event.node)
            yield event, beside


def _coalesces(context: ast.expr) -> bool:
    return isinstance(context, ast.Call) and "coalescing" in last_name(context.func)


def _loop_over_model(event: Event) -> ast.AST | None:
    """Return the innermost loop or comprehension around a collective that goes over what a model holds."""
    own = [(event.module, node) for node in event.module.ancestors(event.node) if isinstance(node, _COMPREHENSIONS)]
    for module, node in (*own, *((loop.module, loop.node) for loop in reversed(event.loops))):
        iterables = [part.iter for part in node.generators] if isinstance(node, _COMPREHENSIONS) else []
        # What an object holds, as `optimizer.param_groups`, is not what it was made of.
        iterables += [node.iter] if isinstance(node, ast.For) and not isinstance(node.iter, ast.Attribute) else []
        body = module.body_around(node)
        if any(_is_of_model(one) for iterable in iterables for one in origins_of(iterable, body)):
            return node
    return None


def _is_of_model(node: ast.AST) -> bool:
    of_group = isinstance(node, ast.Subscript) and getattr(node.slice, "value", None) == "params"
    return of_group or last_name(node) in _OF_MODEL


def _in_one_turn(projection: Projection, event: Event, backward: Event, inner: ast.AST) -> bool:
    """Return whether a collective is reached in every turn of the innermost loop around a backward."""
    loop = innermost_loop(backward)
    if loop is None or loop is inner or all(around.node is not loop for around in event.loops):
        return False
    inside = set(map(id, descend(inner)))
    outside = [condition for condition in event.undecided if id(condition[1]) not in inside]
    script = projection.machine.script
    around, beside = (unsettled(script, one, loop, any_setting=True) for one in (outside, backward.undecided))
    return around == beside[: len(around)]
