"""Tests by a remainder, ``(step + 1) % n == 0``: whether two of them are ever true, or which turns they choose."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from ddpdoctor.source.script.module import Module
from ddpdoctor.source.script.syntax_index import descend

PERIOD = 4
"""Value that a divisor is tried with when it is no number."""
LARGEST_PERIOD = 64
MAXIMUM_DEPTH = 4
"""Variables that are followed to their assignment."""

Number = int | bool


def agree(module: Module, one: ast.expr, other: ast.expr) -> bool:
    """Tell whether the turns that ``other`` chooses are certainly all chosen by ``one``; both are tests by a remainder.

    The two must use the same counter and the same divisor; with anything else in them the answer is no.
    """
    one, other = _resolved(module, one), _resolved(module, other)
    unknown = _names(one) | _names(other)
    divisors = _divisors(one) | _divisors(other)
    if len(divisors) != 1:
        return False
    divisor = next(iter(divisors))
    counters = unknown - _names(ast.parse(divisor, mode="eval").body)
    period = int(divisor) if divisor.isdigit() else PERIOD
    if len(counters) != 1 or not 2 <= period <= LARGEST_PERIOD:
        return False
    counter = next(iter(counters))
    turns = range(3 * period)
    known: list[dict[str, int]] = [{counter: turn} for turn in turns]
    dividing = frozenset(
        inner
        for test in (one, other)
        for inner in descend(test)
        if isinstance(inner, ast.expr) and ast.unparse(inner) == divisor
    )
    chosen = [tuple(_evaluate(test, turn, period, dividing) for test in (one, other)) for turn in known]
    if any(first is None or second is None for first, second in chosen):
        return False
    steps = [first for first, second in chosen if second]
    return bool(steps) and len(steps) < len(turns) and all(steps)


def _evaluate(node: ast.expr, known: Mapping[str, int], period: int, dividing: frozenset[ast.AST]) -> Number | None:
    """The value of a test; ``dividing`` are the nodes that stand for the divisor, which is ``period``."""
    if node in dividing:
        return period
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        value = _evaluate(node.operand, known, period, dividing)
        return None if value is None else not value
    if isinstance(node, ast.BinOp):
        left, right = (_evaluate(side, known, period, dividing) for side in (node.left, node.right))
        return _arithmetic(node.op, left, right)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = (_evaluate(side, known, period, dividing) for side in (node.left, node.comparators[0]))
        return _compared(node.ops[0], left, right)
    return None


def _arithmetic(kind: ast.operator, left: Number | None, right: Number | None) -> Number | None:
    if left is None or right is None:
        return None
    if isinstance(kind, ast.Add):
        return left + right
    if isinstance(kind, ast.Sub):
        return left - right
    return left % right if isinstance(kind, ast.Mod) and right else None


def _compared(kind: ast.cmpop, left: Number | None, right: Number | None) -> bool | None:
    if left is None or right is None:
        return None
    if isinstance(kind, ast.Eq):
        return left == right
    if isinstance(kind, ast.NotEq):
        return left != right
    if isinstance(kind, (ast.Lt, ast.LtE)):
        return left < right if isinstance(kind, ast.Lt) else left <= right
    return None


def _divisors(node: ast.expr) -> set[str]:
    return {
        ast.unparse(inner.right)
        for inner in descend(node)
        if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Mod)
    }


def _names(node: ast.AST) -> set[str]:
    return {inner.id for inner in descend(node) if isinstance(inner, ast.Name)}


def _resolved(module: Module, node: ast.expr) -> ast.expr:
    """A test with variables that are assigned once, from a test by a remainder, put in."""
    for _ in range(MAXIMUM_DEPTH):
        inner = node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) else node
        if not isinstance(inner, ast.Name):
            return node
        values = [
            entry.value
            for entry in module.index.of(ast.Assign)
            if any(isinstance(t, ast.Name) and t.id == inner.id for t in entry.targets)
        ]
        if len(values) != 1:
            return node
        node = ast.UnaryOp(ast.Not(), values[0]) if inner is not node else values[0]
    return node
