"""Arithmetic, comparison and formatting of constants; everything else stays unknown."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddpdoctor.files import regex
from ddpdoctor.source.interpreter.values import (
    BINARY,
    ORDERINGS,
    RANKS,
    TASK_COUNT,
    UNIFORM,
    Const,
    DictValue,
    External,
    ExternalObject,
    Function,
    Instance,
    OneOf,
    Partial,
    ProjectClass,
    ProjectModule,
    SequenceValue,
    Tag,
    TensorSize,
    Unknown,
    Value,
    constant,
    derived,
    in_own_folder,
    is_open,
    never_none,
    tagged,
    tags_of,
    truth,
)
from ddpdoctor.source.ranks.rank_local_values import LISTED, UNREAD_ITEM, extent_of
from ddpdoctor.source.ranks.ranks import WORLD_SIZE
from ddpdoctor.source.vocabulary import DATA_LOADER

REMAINDER = frozenset({("remainder", 0)})
"""Tag of what depends on the remainder of a division: it changes every so many turns of a loop."""
QUOTIENT = frozenset({("quotient", 0)})
"""Tag of what a number is divided by something into: of a rank, the number of its node."""
LONGEST = 10_000
"""Largest text or sequence that is computed."""
LARGEST = 10**18
# Formats that can produce more text than is worth computing.
_WIDE = regex(r"\*|\d{4}")

_OBJECTS = (
    ExternalObject, External, Function, Instance, Partial, ProjectClass, ProjectModule, SequenceValue, DictValue,
)  # fmt: skip


_CLASSES = (External, ProjectClass)
"""Two of these are the same only where they are equal."""


def binary(kind: ast.operator, left: Value, right: Value) -> Value:
    """Return ``left kind right`` on one rank."""
    if isinstance(left, Const) and isinstance(right, Const):
        function = BINARY.get(type(kind))
        if function is not None and _small(kind, left.value, right.value):
            try:
                result = function(left.value, right.value)
            except Exception:
                return Unknown()
            return Const(result) if isinstance(result, (int, float, str, bool, bytes)) else Unknown()
        return Unknown()
    number = left.value if isinstance(left, Const) else None
    if isinstance(kind, ast.Mod) and isinstance(number, int) and _is_device_count(right):
        return Const(number % 2)
    if isinstance(left, SequenceValue) and isinstance(right, SequenceValue) and isinstance(kind, ast.Add):
        return SequenceValue((*left.values, *right.values), left.open or right.open)
    if isinstance(kind, ast.Mod) and right not in (Const(1), Const(0)) and not isinstance(left, Const):
        return derived((left, right), REMAINDER)
    text = constant(right)
    joins = (
        isinstance(kind, (ast.Div, ast.Add)) and isinstance(text, str) and (isinstance(kind, ast.Div) or "/" in text)
    )
    tags = in_own_folder((left,), right) if joins else frozenset[Tag]()
    result = _moved_world_size(kind, left, right) or derived((left, right), tags)
    if scaled := _scaled_turns(kind, left, right):
        # A number of all ranks that is divided by theirs is one rank's again.
        undone = {TURNS_OF_ALL: TURNS_OF_SHARE, TURNS_OF_SHARE: TURNS_OF_ALL}
        back = {(undone[name], number) for name, number in scaled} & (tags_of(left) | tags_of(right))
        gained = {one for one in scaled if (undone[one[0]], one[1]) not in back}
        result = derived((result,), frozenset(gained))
        result = Unknown(result.varying, False, result.tags - back)
    return tagged(result, QUOTIENT) if isinstance(kind, ast.FloorDiv) and isinstance(left, Const) else result


def _moved_world_size(kind: ast.operator, left: Value, right: Value) -> Value | None:
    """Return the number of ranks plus or minus a constant; after any other arithmetic it is no number of ranks."""
    offsets = _offset(left), _offset(right)
    if offsets == (None, None):
        of_node = any(_is_of_node(value) for value in (left, right))
        by_constant = any(isinstance(value, Const) for value in (left, right))
        # Ranks of a node times nodes, whatever those are called.
        if of_node and isinstance(kind, ast.Mult) and not by_constant:
            return WORLD_SIZE
        counted = (of_node and by_constant) or any(TASK_COUNT in tags_of(value) for value in (left, right))
        return derived((left, right), frozenset({("share", 0)})) if counted else None
    number, offset = (right, offsets[0]) if offsets[0] is not None else (left, offsets[1])
    amount = number.value if isinstance(number, Const) else None
    if offset is not None and isinstance(amount, int) and isinstance(kind, (ast.Add, ast.Sub)):
        if isinstance(kind, ast.Add):
            return Unknown(tags=frozenset({("world-size", offset + amount)}))
        if offsets[0] is not None:
            return Unknown(tags=frozenset({("world-size", offset - amount)}))
    return derived((left, right), frozenset({("share", 0)}))


TURNS, TURNS_OF_ALL, TURNS_OF_SHARE = "turns", "turns of all", "turns of a share"
"""Of a number: of the batches of a loader, and these multiplied or divided by the number of ranks."""
_WORLD = WORLD_SIZE.tags


def _scaled_turns(kind: ast.operator, left: Value, right: Value) -> frozenset[Tag]:
    scaled = {ast.Mult: TURNS_OF_ALL, ast.Div: TURNS_OF_SHARE, ast.FloorDiv: TURNS_OF_SHARE}.get(type(kind), "")
    sides = (left,) if scaled == TURNS_OF_SHARE else (left, right)
    by_all = any(tags_of(one) == _WORLD for one in ((right,) if scaled == TURNS_OF_SHARE else sides))
    counted = (number for side in sides for name, number in tags_of(side) if name == TURNS)
    return frozenset((scaled, number) for number in counted) if scaled and by_all else frozenset()


def of_four(value: Value) -> Value:
    """Return the number of ranks, or of those of a node, as the four ranks have it."""
    offset = _offset(value)
    if offset is None:
        return Const(len(RANKS) // 2) if _is_of_node(value) else value
    return Const(len(RANKS) + offset)


def _offset(value: Value) -> int | None:
    """Return how far a value is above the number of ranks; None when it is something else."""
    tags = value.tags - {TASK_COUNT} if isinstance(value, Unknown) and not value.varying else ()
    if len(tags) != 1:
        return None
    [(kind, offset)] = tags
    return offset if kind == "world-size" else None


def _is_device_count(value: Value) -> bool:
    """Return whether a value is the number of devices of a node; the four ranks have two nodes with two each."""
    return isinstance(value, Unknown) and value.tags == frozenset({("device-count", 0)})


def _is_of_node(value: Value) -> bool:
    return _is_device_count(value) or (
        isinstance(value, Unknown) and value.tags == frozenset({("local-world-size", 0)})
    )


def _small(kind: ast.operator, left: object, right: object) -> bool:
    for one, other in ((left, right), (right, left)):
        if isinstance(one, (str, bytes)) and (len(one) > LONGEST or (isinstance(other, int) and abs(other) > 100)):
            return False
        if isinstance(one, int) and abs(one) > LARGEST:
            return False
    if isinstance(kind, ast.Pow):
        numbers = isinstance(right, (int, float)) and isinstance(left, (int, float))
        return numbers and abs(right) <= 64 and abs(left) < 10**6  # type: ignore[arg-type]
    if isinstance(kind, ast.Mod) and isinstance(left, (str, bytes)):
        return not _WIDE.search(str(left))
    return True


def unary(kind: ast.unaryop, operand: Value) -> Value:
    """Return ``-x``, ``+x`` or ``~x`` on one rank."""
    if isinstance(operand, Const) and isinstance(operand.value, (int, float)):
        if isinstance(kind, ast.USub):
            return Const(-operand.value)
        if isinstance(kind, ast.UAdd):
            return operand
    return derived((operand,))


def negated(operand: Value) -> Value:
    """Return ``not x`` on one rank."""
    outcome = truth(operand)
    return derived((operand,)) if outcome is None else Const(not outcome)


def compare(kinds: Sequence[ast.cmpop], operands: Sequence[Value]) -> Value:
    """Evaluate a chain of comparisons on one rank."""
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
    if isinstance(left, _CLASSES) and isinstance(right, _CLASSES) and isinstance(kind, (ast.Eq, ast.NotEq)):
        return Const((left == right) is isinstance(kind, ast.Eq))
    decided = _against_world_size(kind, left, right)
    return derived((left, right)) if decided is None else Const(decided)


def _identical(left: Value, right: Value) -> bool | None:
    if isinstance(left, Const) and isinstance(right, Const):
        return left.value is right.value or (left.value == right.value and type(left.value) is type(right.value))
    if isinstance(left, _CLASSES) and isinstance(right, _CLASSES):
        return left == right
    for one, other in ((left, right), (right, left)):
        if one == Const(None):
            if isinstance(other, _OBJECTS) or (isinstance(other, Unknown) and other.not_none):
                return False
            if isinstance(other, OneOf) and all(isinstance(option, _OBJECTS) for option in other.options):
                return False
    return None


def _contains(container: Value, item: Value) -> bool | None:
    if isinstance(item, _CLASSES) and isinstance(container, SequenceValue) and not container.open:
        return item in container.values if all(isinstance(one, _CLASSES) for one in container.values) else None
    if isinstance(container, (DictValue, SequenceValue)) and truth(container) is False:
        return False
    if not isinstance(item, Const):
        return None
    if isinstance(container, Const) and isinstance(container.value, str) and isinstance(item.value, str):
        return item.value in container.value
    if isinstance(container, SequenceValue) and not container.open:
        if item in container.values:
            return True
        return False if all(isinstance(value, Const) for value in container.values) else None
    if isinstance(container, DictValue):
        found = any(key == item.value for key, _ in container.entries)
        return None if is_open(container) and not found else found
    return None


_MIRRORED: dict[Any, type[ast.cmpop]] = {
    ast.Lt: ast.Gt,
    ast.Gt: ast.Lt,
    ast.LtE: ast.GtE,
    ast.GtE: ast.LtE,
}


def _against_world_size(kind: ast.cmpop, left: Value, right: Value) -> bool | None:
    """Compare a number with the number of ranks, which is more than one; None where it depends on how many."""
    for one, other, test in ((left, right, type(kind)), (right, left, _MIRRORED.get(type(kind), type(kind)))):
        offset = _offset(one)
        if offset is None or not isinstance(other, Const) or not isinstance(other.value, int):
            continue
        if test not in ORDERINGS:
            return None
        at_least, many = ORDERINGS[test](2 + offset, other.value), ORDERINGS[test](LARGEST, other.value)
        if at_least is many and test not in (ast.Eq, ast.NotEq):
            return bool(at_least)
        if test in (ast.Eq, ast.NotEq) and other.value < 2 + offset:
            return test is ast.NotEq
    return None


def formatted(values: Sequence[Value]) -> Value:
    """Return the text that parts of an f-string make on one rank."""
    texts = [str(value.value) if isinstance(value, Const) else "" for value in values]
    if all(isinstance(value, Const) for value in values):
        return Const("".join(texts)[:LONGEST])
    last = max((number for number, text in enumerate(texts) if "/" in text), default=0)
    return derived(values, in_own_folder(values[:last], derived(values[last:])))


# Built-in functions on constants, for one rank at a time.

LONGEST_RANGE = 10_000


def _int(*arguments: Value) -> Value:
    if len(arguments) == 1:
        value = arguments[0]
        if isinstance(value, Const) and isinstance(value.value, (int, float, str)):
            try:
                return Const(int(value.value))
            except (ValueError, OverflowError):
                return Unknown()
        if isinstance(value, Unknown):
            # The number in the name of the newest checkpoint: ranks mostly share their files, and find the same.
            return UNIFORM if value.tags - {UNREAD_ITEM} == {LISTED} else value
    return derived(arguments)


def _float(*arguments: Value) -> Value:
    value = arguments[0] if arguments else Const(0.0)
    if isinstance(value, Const) and isinstance(value.value, (int, float)):
        return Const(float(value.value)) if abs(value.value) < 1e300 else Unknown()
    return derived(arguments)


def _str(*arguments: Value) -> Value:
    value = arguments[0] if arguments else Const("")
    return Const(str(value.value)) if isinstance(value, Const) and len(arguments) <= 1 else derived(arguments)


def _bool(*arguments: Value) -> Value:
    outcome = truth(arguments[0]) if arguments else False
    return derived(arguments) if outcome is None else Const(outcome)


def _len(*arguments: Value) -> Value:
    value = arguments[0] if arguments else Unknown()
    if isinstance(value, SequenceValue) and not value.open:
        return Const(len(value.values))
    if isinstance(value, DictValue) and not is_open(value):
        return Const(len(value.entries))
    if isinstance(value, Const) and isinstance(value.value, str):
        return Const(len(value.value))
    if isinstance(value, ExternalObject) and value.name == DATA_LOADER:
        return Unknown(tags=frozenset({(TURNS, value.number)}), not_none=True)
    return never_none(extent_of(value) or Unknown())


def _range(*arguments: Value) -> Value:
    numbers = [value.value for value in arguments if isinstance(value, Const) and isinstance(value.value, int)]
    if len(numbers) == len(arguments) and 1 <= len(numbers) <= 3 and 0 not in numbers[2:]:
        if any(abs(number) > LONGEST_RANGE for number in numbers):
            return Unknown()
        count = len(range(*numbers))
        if count <= 1:
            return SequenceValue(tuple(Const(number) for number in range(*numbers)))
        if count <= 16:
            return SequenceValue((UNIFORM,) * count)
    return derived([Unknown(derived((value,)).varying) for value in arguments])


def _sum(*arguments: Value) -> Value:
    return Unknown() if any(isinstance(value, TensorSize) for value in arguments) else derived(arguments)


BUILTIN_CALLS: Mapping[str, Callable[..., Value]] = {
    "int": _int,
    "float": _float,
    "str": _str,
    "bool": _bool,
    "len": _len,
    "range": _range,
    "callable": lambda *arguments: Unknown(derived(arguments[:1]).varying),
    **dict.fromkeys(("min", "max"), lambda *arguments: derived(arguments)),
    "sum": _sum,
    "print": lambda *arguments: Const(None),
}
