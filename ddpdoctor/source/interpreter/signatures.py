"""The parameters of a function of the project."""

from __future__ import annotations

import ast
from collections.abc import Mapping

import msgspec


class Signature(msgspec.Struct, frozen=True):
    """Parameters by name."""

    names: tuple[str, ...]
    """Those that may be given by position."""
    all_names: tuple[str, ...]
    """Those, and the ones that can only be given by name."""
    defaults: Mapping[str, ast.expr]
    rest: str
    """Name of ``*args``; empty when there is none."""
    named_rest: str
    """Name of ``**kwargs``; empty when there is none."""


def signature_of(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> Signature:
    """Read the parameters of a function."""
    arguments = node.args
    names = tuple(argument.arg for argument in (*arguments.posonlyargs, *arguments.args))
    defaults = dict(zip(reversed(names), reversed(arguments.defaults), strict=False))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if default is not None:
            defaults[argument.arg] = default
    return Signature(
        names=names,
        all_names=(*names, *(argument.arg for argument in arguments.kwonlyargs)),
        defaults=defaults,
        rest=arguments.vararg.arg if arguments.vararg is not None else "",
        named_rest=arguments.kwarg.arg if arguments.kwarg is not None else "",
    )
