"""How long a schedule of the learning rate is, and where the training ends that it is made for."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import NONE, ExternalObject, options_of
from ddpdoctor.source.script.module import descend, last_name, made_from


def is_returned(node: ast.AST, function: ast.AST) -> bool:
    """Return whether a function returns a node."""
    return any(isinstance(one, ast.Return) and node in descend(one) for one in descend(function))


def ends_of_training(steps: Iterable[Event], made: Event) -> Iterator[str]:
    """Yield how the variables are called at which the loop ends that a scheduler steps in, where it makes a step."""
    for step in steps:
        if not any(
            isinstance(one, ExternalObject) and one.number == made.ordinal for one in options_of(step.receiver or NONE)
        ):
            continue
        for loop in step.loops:
            node = loop.node
            if isinstance(node, ast.For) and isinstance(node.iter, ast.Call) and last_name(node.iter.func) == "range":
                yield from map(ast.unparse, node.iter.args)
            tests = [node.test] if isinstance(node, ast.While) else []
            tests += [
                one.test for one in descend(node) if isinstance(one, ast.If) and isinstance(one.body[-1], ast.Break)
            ]
            for test in (one for one in tests if isinstance(one, ast.Compare)):
                sides = (test.left, *test.comparators)
                yield from (ast.unparse(side) for side in sides if _is_fixed(made, side))


def _is_fixed(made: Event, end: ast.expr) -> bool:
    """Return whether the end of the training is no loader's length, which ``prepare`` divides, nor set anew later."""
    body, name = made.module.body_around(made.node), ast.unparse(end)
    given = [
        one
        for one in descend(body)
        if isinstance(one, ast.Assign) and name in {ast.unparse(part) for each in one.targets for part in descend(each)}
    ]
    later = any(one.lineno > getattr(made.node, "lineno", 0) for one in given)
    parts = (node for one in given for node in made_from(one.value, body))
    return not later and not any(isinstance(node, ast.Call) and last_name(node.func) == "len" for node in parts)
