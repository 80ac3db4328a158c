"""Gradient accumulation over DDP: which backward passes synchronise, and which have to."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import msgspec

from ddpdoctor.source.nodes import descend
from ddpdoctor.source.optimizers import steps
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.trace import Event
from ddpdoctor.source.values import Built, options_of, tags_of
from ddpdoctor.source.vocabulary import DATA_LOADER
from ddpdoctor.source.words import mentions_any
from ddpdoctor.source.wrapped_models import (
    innermost_loop,
    is_prefix,
    loop_nodes,
    training_forwards,
    wrap_numbers,
)

_SKIPS_SYNCHRONISATION = (
    "no_sync",
    "require_backward_grad_sync",
    "accumulate(",
    "ccelerat",
    "set_requires_gradient_sync",
    "lightning",
    "deepspeed",
    "register_comm_hook",
)

_COUNTING_NAME = re.compile(r"(^|_)(last|accum\w*|boundary|sync\w*)(_|$)")


class Accumulation(msgspec.Struct, frozen=True, eq=False):
    """Backward passes through DDP of which several belong to one step of the optimizer."""

    backward: Event
    step: Event
    condition: ast.If | None
    """The test by a remainder that decides about the step, when it is in the step's own function."""
    nested: bool
    """The backward passes are in a loop of their own before the step."""


def accumulations(projection: Projection) -> Iterator[Accumulation]:
    """Backward passes that several times precede one step, each once."""
    known: tuple[Accumulation, ...] | None = projection.__dict__.get("_accumulations")
    if known is None:
        known = projection.__dict__["_accumulations"] = tuple(_accumulations(projection))
    return iter(known)


def _accumulations(projection: Projection) -> Iterator[Accumulation]:
    moves = [step for step in steps(projection) if loop_nodes(step)]
    seen: set[ast.AST] = set()
    for backward in projection.in_course("backward"):
        if backward.node in seen or not wrap_numbers(backward.receiver) or not loop_nodes(backward):
            continue
        for step in moves:
            found = _accumulates(projection, backward, step)
            if found is not None and not any(_follows_at_once(backward, other) for other in moves):
                seen.add(backward.node)
                yield found
                break


def wasteful_accumulations(projection: Projection) -> Iterator[Accumulation]:
    """Accumulations in scripts that never leave out a synchronisation."""
    if not mentions_any(projection.machine.script, _SKIPS_SYNCHRONISATION):
        yield from accumulations(projection)


def forgotten_tails(projection: Projection) -> Iterator[Accumulation]:
    """Accumulations counted by the position in a pass over a loader, without a step for the last batches."""
    for found in accumulations(projection):
        if (
            found.nested
            or found.condition is None
            or mentions_any(projection.machine.script, ("ccelerat", "deepspeed"))
        ):
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
    if inner == outer and is_prefix(backward.conditions, step.conditions):
        extra = step.conditions[len(backward.conditions) :]
        if any(_counts(backward, condition) for condition in extra):
            return Accumulation(backward, step, _remainder_test(step), nested=False)
    if len(inner) == len(outer) + 1 and is_prefix(outer, inner) and backward.ordinal < step.ordinal and outer:
        numbers = wrap_numbers(backward.receiver)
        forwards = [event for number in numbers for event in training_forwards(projection, number)]
        if any(innermost_loop(event) is inner[-1] for event in forwards) and step.conditions == backward.conditions:
            return Accumulation(backward, step, None, nested=True)
    return None


def _follows_at_once(backward: Event, step: Event) -> bool:
    """Whether some optimizer steps after every one of these backward passes."""
    return loop_nodes(step) == loop_nodes(backward) and is_prefix(step.conditions, backward.conditions)


def _counts(backward: Event, condition: str) -> bool:
    """Whether a condition is a test by a remainder other than 1, a variable that holds one, or is named like one."""
    if condition.isidentifier():
        values = [
            ast.unparse(node.value)
            for node in backward.module.index.of(ast.Assign)
            if any(isinstance(t, ast.Name) and t.id == condition for t in node.targets)
        ]
        named = not values and _COUNTING_NAME.search(condition) is not None
        return named or (len(values) == 1 and _counts(backward, values[0]) and not values[0].isidentifier())
    return "%" in condition and "% 1 " not in f"{condition} "


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
    return any(isinstance(option, Built) and option.name == DATA_LOADER for option in options_of(iterable))


def _counts_turns(loop: ast.For, condition: ast.If) -> bool:
    """Whether a test is ``(index + 1) % n == 0`` alone, with the index of ``enumerate`` of its loop."""
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
