"""Gradients are accumulated over several backward passes, and every one of them synchronises.

What it finds
    A training loop that steps the optimizer after several backward passes through DDP, in a script that never uses
    `no_sync()`, or under `accumulate()` of an Accelerator that is given a list of the models. As advice, the same of a
    sharded model, in a script that never sets what it synchronises.

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
import re
from collections.abc import Iterator, Sequence

import msgspec

from ddpdoctor.check import Check, Script
from ddpdoctor.files import regex
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.fix import Fix, fix_of, imported, indented
from ddpdoctor.source.events import Condition, ContextAround, Event
from ddpdoctor.source.interpreter.values import (
    NO_CONTEXT,
    NO_SYNC,
    DictValue,
    ExternalObject,
    OneOf,
    SequenceValue,
    Value,
    options_of,
    tags_of,
)
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.wrapped_models import (
    ddp_objects,
    innermost_loop,
    is_prefix,
    loop_nodes,
    steps,
    training_events,
    training_forwards,
    wrap_numbers,
)
from ddpdoctor.source.script.module import Module, all_once, argument_of, descend
from ddpdoctor.source.script.script import uses_part
from ddpdoctor.source.torch_model.ddp import SHARDED_TAGS
from ddpdoctor.source.vocabulary import DATA_LOADER

CHECK = Check(
    code="DDP204",
    name="missing-no-sync",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.WARNING),
    needs=frozenset({"wraps", "forwards", "backwards", "optimizer_steps"}),
    needs_live=frozenset({"wraps", "loaders", "passes", "step_tracks"}),
    subjects=("training",),
    triggers=("DistributedDataParallel", "ccelerat", "Fabric", "auto_model", "fully_shard", "FullyShardedDataParallel"),
)
_REMEDY = (
    "Run forward and backward of all micro-steps but the last under model.no_sync(); in Fabric it is "
    "fabric.no_backward_sync(model), in Accelerate accelerator.accumulate(model)."
)
_REMEDY_SHARDED = (
    "Call model.set_requires_gradient_sync(False) before all micro-steps but the last, and with True before that one; "
    "whole gradients stay in memory until then. With FullyShardedDataParallel it is model.no_sync()."
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report backward passes that synchronise although the step comes later."""
    for found in wasteful_accumulations(whole_projection(script)):
        backward, step = found.backward, found.step
        yield CHECK.finding(
            "every micro-step of this gradient accumulation synchronises all gradients",
            remedy=_REMEDY if found.through_ddp else _REMEDY_SHARDED,
            locations=backward.location,
            because=("the optimizer steps once for several of these backward passes", step.location),
            severity=None if found.through_ddp else Severity.ADVICE,
        )
    for backward, accumulating in idle_accumulations(whole_projection(script)):
        yield CHECK.finding(
            "every micro-step synchronises all gradients: Accelerate calls no_sync of what accumulate is given, and "
            "that is not the model",
            remedy="Give accumulate the prepared models themselves, one by one: accelerator.accumulate(model, other).",
            locations=accumulating.location,
            because=("this backward goes through DDP", backward.location),
        )


def idle_accumulations(projection: Projection) -> Iterator[tuple[Event, Event]]:
    """Yield backward passes in ``accumulate`` of an Accelerator that is given none of their DDP models: a list, say.

    With the call of that.
    """
    calls = {event.node: event for event in projection.in_course("training") if event.name == "accumulate"}
    if not calls:
        return
    from ddpdoctor.checks.gradients.framework_trap import gathers_steps

    told: set[Event] = set()
    for backward in projection.in_course("backward"):
        calling = next((calls[one.node] for one in backward.contexts if one.node in calls), None)
        if calling is None or calling in told or not calling.complete or not gathers_steps(projection, backward):
            continue
        given = [option for value in calling.positional for option in options_of(value)]
        numbers = wrap_numbers(backward.receiver)
        if numbers and not any(numbers & ddp_objects(one) for one in given) and all(map(_is_known, given)):
            told.add(calling)
            yield backward, calling


def _is_known(given: Value) -> bool:
    """Return whether it is known that something has ``no_sync``, or that it has none: a list, a bare module."""
    return isinstance(given, (SequenceValue, DictValue)) or (
        isinstance(given, ExternalObject) and given.name.startswith("torch.nn.")
    )


def fixes(script: Script, finding: Finding) -> Iterator[Fix]:
    """Offer to run all micro-steps but the last under no_sync."""
    projection = whole_projection(script)
    for found in wasteful_accumulations(projection):
        if found.backward.location == finding.location:
            yield from synchronise_once(projection, found, finding)


in_run = CHECK.judged_by("checks.gradients.steps_run", "reductions", _REMEDY)


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
    if len(nodes) != 1 or last is None:
        return
    forward = next(iter(nodes))
    block = _block_of(module, backward)
    first = next((index for index, statement in enumerate(block) if forward in descend(statement)), None)
    end = next((index for index, statement in enumerate(block) if backward in descend(statement)), None)
    if first is None or end is None or not isinstance(forward, ast.Call) or first > end:
        return
    until = end if found.condition is None else block.index(found.condition) if found.condition in block else -1
    read = {node.id for node in descend(last) if isinstance(node, ast.Name)}
    if until < end or read & _assigned(block[first : until + 1]):
        return
    context = imported(module, "contextlib.nullcontext")
    if context is None:
        return
    model = ast.unparse(forward.func)
    choice = f"{context[0]}() if {ast.unparse(last)} else {model}.no_sync()"
    edits = indented(module, block[first], block[end], f"with {choice}:")
    if edits is not None:
        description = f"run all micro-steps but the last under {model}.no_sync()"
        yield from fix_of(finding, description, *context[1], *edits)


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
    """Return the statements of the loop or function that a backward stands in, at the level of that one."""
    for around in module.ancestors(node):
        if isinstance(around, (ast.For, ast.While)):
            return around.body
        if isinstance(around, (ast.FunctionDef, ast.AsyncFunctionDef)):
            break
    return ()


def _assigned(statements: Sequence[ast.stmt]) -> set[str]:
    return {
        node.id
        for statement in statements
        for node in descend(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


# In a context manager: it may decide whether a backward synchronises.
_CONTROLS = regex(r"no_?sync|accumulat|backward_grad_sync|gradient_sync|nullcontext|suppress", re.IGNORECASE)
_CONTROLLING_CALLS = ("no_sync", "set require_backward_grad_sync")
_SHARDED_CONTROLS = ("no_sync", "set_requires_gradient_sync", "set_requires_all_reduce", "set_is_last_backward")
# torch's own hooks send each gradient in every backward, as DDP without a hook does.
_REDUCING_HOOKS = regex(r"torch\.distributed\.algorithms\.ddp_comm_hooks\.(default|powerSGD|quantization)_hooks?\.")
_COUNTING_NAME = regex(r"(^|_)(last|accum\w*|boundary|sync\w*)(_|$)")
# A condition on how many batches were taken since the last step.
_REACHES_COUNT = regex(r">=?\s*[\w.\[\]'\"]*accum\w*", re.IGNORECASE)
_OPTIMIZER_NAME = regex(r"opt(im\w*|imizer\w*)?(_\w+)?$|(^|\.|_)opt", re.IGNORECASE)


class Accumulation(msgspec.Struct, frozen=True, eq=False):
    """Backward passes through DDP, or a sharded model, of which several belong to one step of the optimizer."""

    backward: Event
    step: Event
    condition: ast.If | None
    """The test by a remainder that decides about the step, when it is in the step's own function."""
    nested: bool
    """The backward passes are in a loop of their own before the step."""

    @property
    def through_ddp(self) -> bool:
        """Whether DDP averages the gradients, and no sharded model does."""
        return bool(wrap_numbers(self.backward.receiver))


@all_once
def accumulations(projection: Projection) -> Iterator[Accumulation]:
    """Backward passes that several times precede one step, each once."""
    moves = [step for step in _any_steps(projection) if loop_nodes(step)]
    seen: set[ast.AST] = set()
    for backward in projection.in_course("backward"):
        averaged = wrap_numbers(backward.receiver) or wrap_numbers(backward.receiver, SHARDED_TAGS[0])
        if backward.node in seen or not averaged or not loop_nodes(backward):
            continue
        for step in moves:
            found = _accumulates(projection, backward, step)
            if found is not None and not any(_follows_at_once(projection, backward, other) for other in moves):
                seen.add(backward.node)
                yield found
                break


def wasteful_accumulations(projection: Projection) -> Iterator[Accumulation]:
    """Accumulations in which nothing around the forward and the backward may leave out a synchronisation."""
    controls = [event for event in projection.of_kind("training") if event.name in _CONTROLLING_CALLS]
    hooks = (event for event in projection.of_kind("training") if event.name == "ddp.register_comm_hook")
    if not all(map(_reduces_always, hooks)) or any(
        event.receiver is not None and ddp_objects(event.receiver) for event in controls
    ):
        return
    told: set[ast.AST | None] = set()
    for found in accumulations(projection):
        loop = innermost_loop(found.backward)
        if loop in told:
            continue  # Two arms of one loop, with a scaler and without one, accumulate for one reason.
        if not found.through_ddp and uses_part(projection.machine.script, _SHARDED_CONTROLS):
            continue
        forwards = (event for event in projection.in_course("ddp-forward") if innermost_loop(event) is loop)
        contexts = [context for event in (found.backward, *forwards) for context in event.contexts]
        if not any(map(_may_control, contexts)) and not any(innermost_loop(event) is loop for event in controls):
            told.add(loop)
            yield found


def _reduces_always(hooking: Event) -> bool:
    """Return whether a communication hook is one of torch's that reduces each bucket; one's own may leave some out."""
    hook = argument_of(hooking.module.parents.get(hooking.node, hooking.node), "hook", 1)
    return hook is not None and _REDUCING_HOOKS.match(hooking.module.resolve(hook)) is not None


def _may_control(context: ContextAround) -> bool:
    if context.value in (NO_SYNC, NO_CONTEXT) or isinstance(context.value, OneOf):
        return True
    return _CONTROLS.search(context.module.excerpt(context.node, 500)) is not None


def _is_accelerators(context: ContextAround) -> bool:
    """Return whether a context manager takes an epoch's last micro-steps for a whole step, as ``accumulate(model)``."""
    return ".accumulate(" in context.module.excerpt(context.node, 500)


def _any_steps(projection: Projection) -> list[Event]:
    """Return the steps of known optimizers, and of what is used or named like one or stepped by a gradient scaler."""
    known = steps(projection)
    nodes = {event.node for event in known}
    return known + [
        event for event in training_events(projection, "step") if event.node not in nodes and _is_named_optimizer(event)
    ]


def _is_named_optimizer(event: Event) -> bool:
    """Return whether what steps is used as an optimizer, which clears gradients, too, or is named like one."""
    call = event.node
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return False
    cleared = (one.func for one in event.module.calls_by_name.get("zero_grad", ()))
    whose = ast.dump(call.func.value)
    if any(isinstance(one, ast.Attribute) and ast.dump(one.value) == whose for one in cleared):
        return True
    names = [ast.unparse(node) for node in (call.func.value, *call.args[:1])]
    return any(_OPTIMIZER_NAME.search(name.rpartition(".")[2]) for name in names)


def forgotten_tails(projection: Projection) -> Iterator[Accumulation]:
    """Accumulations counted by the position in a pass over a loader, without a step for the last batches."""
    for found in accumulations(projection):
        if found.nested or found.condition is None or any(map(_is_accelerators, found.backward.contexts)):
            continue
        loop = found.backward.loops[-1]
        if (
            not isinstance(loop.node, ast.For)
            or not _over_loader(found)
            or not _counts_turns(loop.node, found.condition)
        ):
            continue
        outer = loop_nodes(found.step)[:-1]
        after = any(
            step is not found.step and loop_nodes(step) == outer and step.ordinal > found.step.ordinal
            for step in steps(projection)
        )
        if not after:
            yield found


def _accumulates(projection: Projection, backward: Event, step: Event) -> Accumulation | None:
    inner, outer = loop_nodes(backward), loop_nodes(step)
    shared = _shared_conditions(backward, step)
    if any(_is_counting(projection, backward, test) for test in backward.undecided[shared:]):
        return None
    if inner == outer:
        if any(_is_counting(projection, backward, test) for test in step.undecided[shared:]):
            return Accumulation(backward, step, _remainder_test(step), nested=False)
        if _is_skipped(projection, backward, step):
            return Accumulation(backward, step, None, nested=False)
    if len(inner) == len(outer) + 1 and is_prefix(outer, inner) and backward.ordinal < step.ordinal and outer:
        numbers = wrap_numbers(backward.receiver)
        forwards = [event for number in numbers for event in training_forwards(projection, number)]
        sharded = wrap_numbers(backward.receiver, SHARDED_TAGS[0])
        forwards += [one for one in projection.in_course("forward") if getattr(one.receiver, "number", 0) in sharded]
        if any(innermost_loop(event) is inner[-1] for event in forwards) and len(step.conditions) == shared:
            return Accumulation(backward, step, None, nested=True)
    return None


def _shared_conditions(backward: Event, step: Event) -> int:
    """Return how many conditions are around both; of a backward in several precisions, each is in an arm of its own."""
    pairs = zip(backward.conditions, step.conditions, strict=False)
    return next(
        (index for index, (one, other) in enumerate(pairs) if one != other),
        min(map(len, (backward.conditions, step.conditions))),
    )


def _is_counting(projection: Projection, backward: Event, condition: Condition) -> bool:
    module, test = condition
    return test in projection.machine.counting or _counts(backward, module.excerpt(test, 1_000))


def _is_skipped(projection: Projection, backward: Event, step: Event) -> bool:
    """Return whether the turns of a loop between two steps end before the step: ``if i % n != 0: continue``."""
    loop = innermost_loop(step)
    if not isinstance(loop, (ast.For, ast.While)):
        return False
    for statement in loop.body:
        if any(inner is step.node for inner in descend(statement)):
            return False
        if isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Continue):
            before = backward.module is not step.module or backward.node.lineno < statement.lineno  # type: ignore[attr-defined]
            if before and _is_counting(projection, backward, (step.module, statement.test)):
                return True
    return False


def _follows_at_once(projection: Projection, backward: Event, step: Event) -> bool:
    """Return whether some optimizer steps after every one of these backward passes."""
    if loop_nodes(step) != loop_nodes(backward) or not is_prefix(step.conditions, backward.conditions):
        return False
    return not _is_skipped(projection, backward, step)


def _counts(backward: Event, condition: str) -> bool:
    """Return whether a condition tests a remainder other than 1, is a variable that holds one, or is named so."""
    if condition.isidentifier():
        values = [ast.unparse(one.value) for one in backward.module.assigning(backward.module.tree, condition)]
        named = not values and _COUNTING_NAME.search(condition) is not None
        return named or (len(values) == 1 and _counts(backward, values[0]) and not values[0].isidentifier())
    reached = _REACHES_COUNT.search(condition)
    if reached is not None and not _is_one(backward, reached[0].lstrip(">= ")):
        return True
    return "%" in condition and "% 1 " not in f"{condition} "


def _is_one(backward: Event, name: str) -> bool:
    """Return whether the module sets a variable to 1 and to nothing else: then every batch makes a step."""
    values = [
        ast.unparse(node.value)
        for node in backward.module.index.of(ast.Assign)
        if any(isinstance(target, ast.Name) and target.id.startswith(name) for target in node.targets)
    ]
    return bool(values) and set(values) == {"1"}


def _remainder_test(step: Event) -> ast.If | None:
    for around in step.module.ancestors(step.node):
        if isinstance(around, (ast.FunctionDef, ast.For, ast.While)):
            return None
        if isinstance(around, ast.If):
            return around
    return None


def _over_loader(found: Accumulation) -> bool:
    iterable = found.backward.loops[-1].iterable
    if any(kind in ("loader", "batch") for kind, _ in tags_of(iterable)):
        return True
    return any(isinstance(option, ExternalObject) and option.name == DATA_LOADER for option in options_of(iterable))


def _counts_turns(loop: ast.For, condition: ast.If) -> bool:
    """Return whether a test is ``(index + 1) % n == 0`` alone, with the index of ``enumerate`` of its loop."""
    test = condition.test
    if (
        not isinstance(test, ast.Compare)
        or not isinstance(test.left, ast.BinOp)
        or not isinstance(test.left.op, ast.Mod)
    ):
        return False
    if not isinstance(loop.target, ast.Tuple) or not isinstance(loop.target.elts[0], ast.Name):
        return False
    enumerates = any(isinstance(node, ast.Name) and node.id == "enumerate" for node in descend(loop.iter))
    sliced = any(isinstance(node, ast.Name) and node.id == "islice" for node in descend(loop.iter))
    names = {node.id for node in descend(test.left.left) if isinstance(node, ast.Name)}
    drops = any(isinstance(node, (ast.Break, ast.Continue)) for node in descend(loop))
    return enumerates and not sliced and not drops and names == {loop.target.elts[0].id} and not condition.orelse
