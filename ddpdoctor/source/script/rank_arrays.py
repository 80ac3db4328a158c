"""Arrays of ranks as a script writes them: in which order their axes count the ranks."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from ddpdoctor.source.script.module import Module, argument_of, last_name

_COUNTING = frozenset({"torch.arange", "numpy.arange"})
_MADE_OF_LISTS = frozenset({"torch.tensor", "torch.as_tensor", "torch.from_numpy", "numpy.array", "numpy.asarray"})
# Methods that leave the axes of an array as they are.
_KEEPS = frozenset({"contiguous", "clone", "to", "int", "long", "cpu", "numpy", "tolist", "astype"})
_DEEPEST = 12
"""Calls and variables between an array and what it is made of."""


def axes_of_mesh(module: Module, made: ast.AST) -> tuple[int, ...]:
    """Return the axes of the array of ranks that a call of ``DeviceMesh`` is given."""
    return axes_of(module, argument_of(made, "mesh", 1))


def axes_of(module: Module, array: ast.expr | None, depth: int = 0) -> tuple[int, ...]:
    """Return the place of each axis of an array among those that count the ranks, outermost first.

    ``torch.arange(8).view(2, 4)`` has (0, 1) and its transpose (1, 0); empty is what is not known, or is none of these.
    """
    if depth > _DEEPEST:
        return ()
    if isinstance(array, (ast.List, ast.Tuple)):
        return _of_list(array)
    if isinstance(array, ast.Attribute) and array.attr in ("T", "mT"):
        return axes_of(module, array.value, depth + 1)[::-1]
    if isinstance(array, (ast.Name, ast.Attribute)):
        around = module.tree if isinstance(array, ast.Attribute) else module.body_around(array)
        values = module.assigned(around, array) or module.assigned(module.tree, array)
        return axes_of(module, values[0], depth + 1) if len(values) == 1 else ()
    if not isinstance(array, ast.Call):
        return ()
    name, last = module.resolve(array.func), last_name(array.func)
    if name in _COUNTING or (isinstance(array.func, ast.Name) and last == "range"):
        return (0,) if len(array.args) == 1 else ()
    if name in _MADE_OF_LISTS or (isinstance(array.func, ast.Name) and last == "list"):
        return axes_of(module, array.args[0], depth + 1) if array.args else ()
    of_function = name.startswith(("torch.", "numpy."))
    owner = array.args[0] if of_function and array.args else getattr(array.func, "value", None)
    return _moved(axes_of(module, owner, depth + 1), last, array.args[1:] if of_function else array.args)


def _moved(axes: tuple[int, ...], method: str, given: Sequence[ast.expr]) -> tuple[int, ...]:
    """Return the axes after a method of an array."""
    if method in _KEEPS or not axes:
        return axes
    if method == "t":
        return axes[::-1]
    sizes = given[0].elts if len(given) == 1 and isinstance(given[0], (ast.Tuple, ast.List)) else given
    if method in ("view", "reshape"):
        known = axes == tuple(range(len(axes))) and not any(isinstance(one, ast.Starred) for one in sizes)
        one_variable = len(given) == 1 and isinstance(given[0], (ast.Name, ast.Attribute))
        return tuple(range(len(sizes))) if known and not one_variable else ()
    try:
        places = [int(ast.literal_eval(one)) for one in sizes]
        if method == "permute":
            return tuple(axes[place] for place in places)
        if method in ("transpose", "swapaxes"):
            moved = list(axes)
            one, other = places
            moved[one], moved[other] = axes[other], axes[one]
            return tuple(moved)
    except (ValueError, TypeError, IndexError):
        return ()
    return ()


def _of_list(array: ast.List | ast.Tuple) -> tuple[int, ...]:
    """Return the axes of ranks that are written out, where every step along an axis goes as far."""
    try:
        whole = part = ast.literal_eval(array)
        strides: list[int] = []
        while isinstance(part, (list, tuple)):
            strides.append(_first(part[1]) - _first(part[0]))
            part = part[0]
        even = _is_even(whole, _first(whole), strides)
    except (ValueError, TypeError, IndexError):
        return ()
    outermost_first = sorted(strides, reverse=True)
    known = even and len(set(strides)) == len(strides)
    return tuple(outermost_first.index(one) for one in strides) if known else ()


def _first(part: Any) -> Any:
    return _first(part[0]) if isinstance(part, (list, tuple)) else part


def _is_even(part: Any, first: int, strides: Sequence[int]) -> bool:
    if not strides:
        return bool(part == first)
    return all(_is_even(one, first + place * strides[0], strides[1:]) for place, one in enumerate(part))
