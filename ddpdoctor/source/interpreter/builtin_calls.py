"""Built-in functions on constants, for one rank at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ddpdoctor.source.interpreter.values import (
    UNIFORM,
    Const,
    DictValue,
    SequenceValue,
    TensorSize,
    Unknown,
    Value,
    derived,
    never_none,
    truth,
)
from ddpdoctor.source.ranks.rank_local_values import LISTED, UNREAD_ITEM, extent_of

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
    if isinstance(value, DictValue):
        return Const(len(value.entries))
    if isinstance(value, Const) and isinstance(value.value, str):
        return Const(len(value.value))
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
    return derived([_varying_only(value) for value in arguments])


def _varying_only(value: Value) -> Value:
    """Return an unknown number that differs by rank where its bound does."""
    return Unknown(derived((value,)).varying)


def _callable(*arguments: Value) -> Value:
    return Unknown(derived(arguments[:1]).varying)


def _minmax(*arguments: Value) -> Value:
    return derived(arguments)


def _plain_tensor(*arguments: Value) -> Value:
    return Unknown() if any(isinstance(value, TensorSize) for value in arguments) else derived(arguments)


BUILTIN_CALLS: Mapping[str, Callable[..., Value]] = {
    "int": _int,
    "float": _float,
    "str": _str,
    "bool": _bool,
    "len": _len,
    "range": _range,
    "callable": _callable,
    "min": _minmax,
    "max": _minmax,
    "sum": _plain_tensor,
    "print": lambda *arguments: Const(None),
}
