"""Gradients are accumulated over several backward passes, and every one of them synchronises.

What it finds
    A training loop that steps the optimizer after several backward passes through DDP, in a script that never uses
    `no_sync()`.

Why it is bad
    Each backward all-reduces all gradients, though only the sum before the step is needed. With n micro-steps the job
    sends n times the bytes, and waits for the slowest rank n times a step.

Example
    for i, batch in enumerate(loader):
        (model(batch).mean() / 8).backward()        # all-reduces every time
        if (i + 1) % 8 == 0:
            optimizer.step()

Remedy
    Run forward and backward of all micro-steps but the last under model.no_sync():
    context = contextlib.nullcontext() if last else model.no_sync().

When it is wrong
    Where the number of micro-steps is 1 in practice. require_backward_grad_sync set by hand and Accelerate's
    accumulate() are recognised.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html#torch.nn.parallel.DistributedDataParallel.no_sync
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.checks.gradients.accumulation_source import Accumulation, wasteful_accumulations
from ddpdoctor.finding import Finding, Refuted, Severity
from ddpdoctor.fix import Fix, imported, indented
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.wrapped_models import training_forwards, wrap_numbers
from ddpdoctor.source.script.module import Module, descend
from ddpdoctor.source.script.script import Script

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP204",
    name="missing-no-sync",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.WARNING),
    needs=frozenset({"wraps", "forwards", "backwards", "optimizer_steps"}),
    needs_live=frozenset({"wraps", "loaders", "passes", "step_tracks"}),
    subjects=("training",),
    triggers=("DistributedDataParallel", "ccelerat", "Fabric", "auto_model"),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report backward passes that synchronise although the step comes later."""
    for found in wasteful_accumulations(whole_projection(script)):
        backward, step = found.backward, found.step
        yield CHECK.finding(
            "source",
            "every micro-step of this gradient accumulation synchronises all gradients",
            remedy="Run forward and backward of all micro-steps but the last under model.no_sync().",
            locations=backward.location,
            because=(("the optimizer steps once for several of these backward passes", step.location),),
        )


def fixes(script: Script, finding: Finding) -> Iterator[Fix]:
    """Offer to run all micro-steps but the last under no_sync."""
    projection = whole_projection(script)
    for found in wasteful_accumulations(projection):
        if found.backward.location == finding.location:
            yield from synchronise_once(projection, found, finding)


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report wraps that reduce their gradients several times for one step; refute it where each step has one backward.

    A `no_sync()` that comes too late to have an effect is reported by misplaced-no-sync alone.
    """
    from ddpdoctor.checks.gradients.steps_run import late_no_syncs, reductions
    from ddpdoctor.diagnosis.wording import bytes_text, site_location

    misplaced = {wrap.wrap for _, _, wrap in late_no_syncs(record)}
    for found in reductions(record):
        places = tuple(place for site in found.sites if (place := site_location(record.site(site))) is not None)
        if not found.several:
            reason = f"each of {found.steps} steps followed one reduction"
            yield from (Refuted(location=place, reason=reason) for place in places)
        elif 2 * found.several > found.steps and found.several > 1 and found.wrap not in misplaced:
            yield CHECK.finding(
                record.job.kind,
                f"{found.per_step} backward passes before each optimizer step synchronise all gradients of "
                f"{found.model}: {bytes_text(found.wasted_bytes)} a step are sent for nothing",
                remedy="Run forward and backward of all micro-steps but the last under model.no_sync().",
                locations=places,
                because=(
                    (
                        f"{found.several} of {found.steps} optimizer steps came after several reductions",
                        found.step_location,
                        {
                            "reductions_per_step": found.per_step,
                            "wasted_bytes_per_step": found.wasted_bytes,
                            "steps": found.steps,
                        },
                    ),
                ),
            )


# The suggestion to synchronise only the last backward of a gradient accumulation.


def synchronise_once(projection: Projection, found: Accumulation, finding: Finding) -> Iterator[Fix]:
    """Run forward and backward under ``no_sync()`` unless the step follows.

    Nothing is offered unless one forward and its backward stand in one block, and the test that decides about the step
    is already known before the forward. It is never safe: the last micro-steps of an epoch are not averaged any more.
    """
    module, backward = found.backward.module, found.backward.node
    forwards = [
        event for number in wrap_numbers(found.backward.receiver) for event in training_forwards(projection, number)
    ]
    nodes = {event.node: event for event in forwards}
    last = _last_micro_step(found)
    if len(nodes) != 1 or last is None or finding.location is None:
        return
    forward = next(iter(nodes))
    block = _block_of(module, backward)
    first = next((index for index, statement in enumerate(block) if _holds(statement, forward)), None)
    end = next((index for index, statement in enumerate(block) if _holds(statement, backward)), None)
    if first is None or end is None or not isinstance(forward, ast.Call) or first > end:
        return
    until = end if found.condition is None else _index_of(block, found.condition)
    if until is None or until < end or _names(last) & _assigned(block[first : until + 1]):
        return
    context = imported(module, "contextlib.nullcontext")
    if context is None:
        return
    model = ast.unparse(forward.func)
    choice = ast.unparse(ast.IfExp(last, ast.parse(f"{context[0]}()", mode="eval").body, _call(f"{model}.no_sync")))
    edits = indented(module, block[first], block[end], f"with {choice}:")
    if edits is not None:
        yield Fix(
            code=finding.code,
            description=f"run all micro-steps but the last under {model}.no_sync()",
            location=finding.location,
            edits=(*context[1], *edits),
            safe=False,
        )


def _call(function: str) -> ast.expr:
    return ast.parse(f"{function}()", mode="eval").body


def _last_micro_step(found: Accumulation) -> ast.expr | None:
    """Return the test that the step follows this backward; None where it has to be called to be known."""
    if found.condition is not None:
        calls = (node for node in descend(found.condition.test) if isinstance(node, ast.Call))
        pure = all(isinstance(call.func, ast.Name) and call.func.id in {"len", "int"} for call in calls)
        return found.condition.test if pure else None
    if not found.nested:
        return None
    loop = next((around.node for around in reversed(found.backward.loops) if not around.once), None)
    if not isinstance(loop, ast.For) or not isinstance(loop.target, ast.Name) or not isinstance(loop.iter, ast.Call):
        return None
    counts = isinstance(loop.iter.func, ast.Name) and loop.iter.func.id == "range" and len(loop.iter.args) == 1
    bound = loop.iter.args[0] if counts else None
    if not isinstance(bound, (ast.Name, ast.Attribute, ast.Constant)):
        return None
    return ast.parse(f"{loop.target.id} == {ast.unparse(bound)} - 1", mode="eval").body


def _block_of(module: Module, node: ast.AST) -> Sequence[ast.stmt]:
    """Return the statements of the loop or function that a backward stands in, at the level of that loop or
    function.
    """
    for around in module.ancestors(node):
        if isinstance(around, (ast.For, ast.While)):
            return around.body
        if isinstance(around, (ast.FunctionDef, ast.AsyncFunctionDef)):
            break
    return ()


def _index_of(block: Sequence[ast.stmt], condition: ast.If) -> int | None:
    return next((index for index, statement in enumerate(block) if statement is condition), None)


def _holds(statement: ast.stmt, node: ast.AST) -> bool:
    return any(inner is node for inner in descend(statement))


def _names(expression: ast.expr) -> set[str]:
    return {node.id for node in descend(expression) if isinstance(node, ast.Name)}


def _assigned(statements: Sequence[ast.stmt]) -> set[str]:
    return {
        node.id
        for statement in statements
        for node in descend(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
