"""Arithmetic, comparison and formatting of constants; everything else stays unknown."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddpdoctor.source.values import (
    Built,
    Choice,
    Const,
    External,
    Function,
    Instance,
    Items,
    Mapped,
    Partial,
    ProjectClass,
    ProjectModule,
    Unknown,
    Value,
    derived,
    truth,
)

LONGEST = 10_000
"""Largest text or sequence that is computed."""
LARGEST = 10**18
_WIDE = re.compile(r"\*|\d{4}")
"""Formats that can ask for more text than is worth computing."""

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.Pow: operator.pow,
}
ORDERINGS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_OBJECTS = (Built, External, Function, Instance, Partial, ProjectClass, ProjectModule, Items, Mapped)


def binary(kind: ast.operator, left: Value, right: Value) -> Value:
    """``left kind right`` on one rank."""
    if isinstance(left, Const) and isinstance(right, Const):
        function = _BINARY.get(type(kind))
        if function is not None and _small(kind, left.value, right.value):
            try:
                result = function(left.value, right.value)
            except Exception:
                return Unknown()
            return Const(result) if isinstance(result, (int, float, str, bool, bytes)) else Unknown()
        return Unknown()
    if (
        isinstance(kind, ast.Mod)
        and isinstance(left, Const)
        and isinstance(left.value, int)
        and _is_device_count(right)
    ):
        return Const(left.value % 2)
    if isinstance(left, Items) and isinstance(right, Items) and isinstance(kind, ast.Add):
        return Items((*left.values, *right.values), left.open or right.open)
    return derived((left, right))


def _is_device_count(value: Value) -> bool:
    """The four ranks looked at stand on two nodes with two devices each."""
    return isinstance(value, Unknown) and value.tags == frozenset({("device-count", 0)})


def _small(kind: ast.operator, left: object, right: object) -> bool:
    for one, other in ((left, right), (right, left)):
        if isinstance(one, (str, bytes)) and (len(one) > LONGEST or (isinstance(other, int) and abs(other) > 100)):
            return False
        if isinstance(one, int) and abs(one) > LARGEST:
            return False
    if isinstance(kind, ast.Pow):
        return (
            isinstance(right, (int, float))
            and isinstance(left, (int, float))
            and abs(right) <= 64
            and abs(left) < 10**6
        )
    if isinstance(kind, ast.Mod) and isinstance(left, (str, bytes)):
        return not _WIDE.search(str(left))
    return True


def unary(kind: ast.unaryop, operand: Value) -> Value:
    """``-x``, ``+x`` and ``~x`` on one rank."""
    if isinstance(operand, Const) and isinstance(operand.value, (int, float)):
        if isinstance(kind, ast.USub):
            return Const(-operand.value)
        if isinstance(kind, ast.UAdd):
            return operand
    return derived((operand,))


def negated(operand: Value) -> Value:
    """``not x`` on one rank."""
    outcome = truth(operand)
    return derived((operand,)) if outcome is None else Const(not outcome)


def compare(kinds: Sequence[ast.cmpop], operands: Sequence[Value]) -> Value:
    """A chain of comparisons on one rank."""
    result: Value = Const(True)
    for kind, left, right in zip(kinds, operands, operands[1:], strict=False):
        single = _compare(kind, left, right)
        if single == Const(False):
            return single
        if single != Const(True):
            result = derived((single,) if result == Const(True) else (single, result))
    return result


def _compare(kind: ast.cmpop, left: Value, right: Value) -> Value:
    if isinstance(kind, (ast.Is, ast.IsNot)):
        same = _identical(left, right)
        return derived((left, right)) if same is None else Const(same is isinstance(kind, ast.Is))
    if isinstance(kind, (ast.In, ast.NotIn)):
        inside = _contains(right, left)
        return derived((left, right)) if inside is None else Const(inside is isinstance(kind, ast.In))
    if isinstance(left, Const) and isinstance(right, Const):
        try:
            return Const(bool(ORDERINGS[type(kind)](left.value, right.value)))
        except Exception:
            return Unknown()
    if Const(None) in (left, right) and isinstance(kind, (ast.Eq, ast.NotEq)):
        same = _identical(left, right)
        return derived((left, right)) if same is None else Const(same is isinstance(kind, ast.Eq))
    against_one = _world_size_against_one(kind, left, right)
    return derived((left, right)) if against_one is None else Const(against_one)


def _identical(left: Value, right: Value) -> bool | None:
    if isinstance(left, Const) and isinstance(right, Const):
        return left.value is right.value or (left.value == right.value and type(left.value) is type(right.value))
    for one, other in ((left, right), (right, left)):
        if one == Const(None):
            if isinstance(other, _OBJECTS):
                return False
            if isinstance(other, Choice) and all(isinstance(option, _OBJECTS) for option in other.options):
                return False
    return None


def _contains(container: Value, item: Value) -> bool | None:
    if not isinstance(item, Const):
        return None
    if isinstance(container, Const) and isinstance(container.value, str) and isinstance(item.value, str):
        return item.value in container.value
    if isinstance(container, Items) and not container.open:
        if item in container.values:
            return True
        return False if all(isinstance(value, Const) for value in container.values) else None
    if isinstance(container, Mapped):
        return any(key == item.value for key, _ in container.entries)
    return None


def _world_size_against_one(kind: ast.cmpop, left: Value, right: Value) -> bool | None:
    """The world has more than one rank; how many is not known."""
    if _is_world_size(left) and isinstance(right, Const) and isinstance(right.value, int):
        bound, test = right.value, type(kind)
    elif _is_world_size(right) and isinstance(left, Const) and isinstance(left.value, int):
        mirrored: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
            ast.Lt: ast.Gt,
            ast.Gt: ast.Lt,
            ast.LtE: ast.GtE,
            ast.GtE: ast.LtE,
        }
        bound, test = left.value, mirrored.get(type(kind), type(kind))
    else:
        return None
    if bound <= 1 and test in (ast.Eq, ast.LtE, ast.NotEq, ast.Gt):
        return test in (ast.NotEq, ast.Gt)
    if bound <= 2 and test in (ast.Lt, ast.GtE):
        return test is ast.GtE
    return None


def _is_world_size(value: Value) -> bool:
    return isinstance(value, Unknown) and value.tags == frozenset({("world-size", 0)})


def formatted(values: Sequence[Value]) -> Value:
    """The text that parts of an f-string make on one rank."""
    if all(isinstance(value, Const) for value in values):
        text = "".join(str(value.value) for value in values if isinstance(value, Const))
        return Const(text[:LONGEST])
    return derived(values)
