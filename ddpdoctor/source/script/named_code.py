"""Names of code that are put together, as ``f"models.{args.model}"``, and the settings that are parts of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice, product

from ddpdoctor.files import regex
from ddpdoctor.source.script.launch_facts import destination
from ddpdoctor.source.script.module import Module, absolute, argument_of, last_name, once

UNKNOWN_PART = "\0"
"""Stands in a text for a part that is not known."""
MOST_TEXTS = 16
"""Texts that one expression may have: each setting in it mostly has one default."""
_FIELD = regex(r"%[a-z]|\{[^{}]*\}")
# Calls that make settings of their keywords.
_HOLDERS = frozenset({"dict", "Namespace", "SimpleNamespace", "set_defaults"})


def spelled(node: ast.expr, of_part: Callable[[ast.expr], Collection[str]]) -> Collection[str]:
    """Return the texts that an expression puts together; ``of_part`` gives those of parts that are not written out."""
    if isinstance(node, ast.Constant):
        return (str(node.value),)
    if isinstance(node, ast.JoinedStr):
        parts: Sequence[ast.expr] = [
            part.value if isinstance(part, ast.FormattedValue) else part for part in node.values
        ]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [node.left, node.right]
    else:
        parts = _filled(node)
    if not parts:
        return of_part(node)
    return ["".join(texts) for texts in islice(product(*(spelled(part, of_part) for part in parts)), MOST_TEXTS)]


def _filled(node: ast.expr) -> Sequence[ast.expr]:
    """Return the texts and the fields of ``"a.%s" % b`` or ``"a.{}".format(b)``; empty for anything else."""
    template: ast.expr | None = None
    given: Sequence[ast.expr] = ()
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        template, given = node.left, node.right.elts if isinstance(node.right, ast.Tuple) else [node.right]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        template, given = node.func.value, [*node.args, *(word.value for word in node.keywords)]
    if not isinstance(template, ast.Constant) or not isinstance(template.value, str):
        return ()
    first, *texts = _FIELD.split(template.value)
    if len(given) != len(texts):
        given = [ast.Constant(UNKNOWN_PART)] * len(texts)
    return [ast.Constant(first), *(part for field, text in zip(given, texts) for part in (field, ast.Constant(text)))]


def template_of(module: Module, node: ast.expr, depth: int = 0) -> str:
    """Return a text that is put together, with ``UNKNOWN_PART`` for each part that is not written out."""

    def of_part(part: ast.expr) -> Collection[str]:
        named = isinstance(part, ast.Name) and not depth
        values = module.assigned(module.body_around(part), part) if named else ()
        return (template_of(module, values[0], depth + 1) if len(values) == 1 else UNKNOWN_PART,)

    return next(iter(spelled(node, of_part)))


def may_be(template: str, name: str) -> bool:
    """Return whether a text with parts that are not known may be a name."""
    return re.fullmatch(re.escape(template).replace(UNKNOWN_PART, r"\w*"), name) is not None


def imports_by_name(module: Module) -> Sequence[ast.Call]:
    """Return the calls that import a module by its name."""
    names = [name for name in ("import_module", "__import__") if name in module.text]
    return [call for name in names for call in module.calls_by_name.get(name, ()) if call.args]


def absolute_name(module: Module, call: ast.AST, name: str) -> str:
    """Return the name of the module that a call imports, where it may be relative to a package that the call is given.

    >>> import_module("." + name, package=__package__)
    """
    level = len(name) - len(name.lstrip("."))
    package = argument_of(call, "package", 1)
    base = package.value if isinstance(package, ast.Constant) else module.package
    return absolute(name[level:], level, str(base))


def defaults_of(modules: Sequence[Module], name: str) -> Collection[str]:
    """Return the texts that a setting of a name has by default: as an option of the command line, or else elsewhere."""
    for kind in (0, 1):
        if found := {text for module in modules for text in _defaults(module)[kind].get(name, ())}:
            return found
    return ()


@once
def _defaults(module: Module) -> tuple[Mapping[str, set[str]], Mapping[str, set[str]]]:
    """Return the texts by which a module sets options by default, and those in its dicts, fields and attributes."""
    options: dict[str, set[str]] = {}
    others: dict[str, set[str]] = {}

    def add(found: dict[str, set[str]], name: object, value: ast.AST | None) -> None:
        if isinstance(name, str) and isinstance(value, ast.Constant) and isinstance(value.value, str):
            found.setdefault(name, set()).add(value.value)

    for call in module.index.of(ast.Call):
        first = call.args[0] if call.args else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str):  # Of argparse, click, or absl's flags.
            flag = last_name(call.func).startswith("DEFINE_")
            add(options, first.value if flag else destination(call), argument_of(call, "default", 1 if flag else -1))
        for word in call.keywords if last_name(call.func) in _HOLDERS else ():
            add(others, word.arg, word.value)
    for table in module.index.of(ast.Dict):
        for key, value in zip(table.keys, table.values, strict=True):
            add(others, getattr(key, "value", None), value)
    for assigned in (*module.index.of(ast.Assign), *module.index.of(ast.AnnAssign)):
        for target in assigned.targets if isinstance(assigned, ast.Assign) else [assigned.target]:
            key = target.slice if isinstance(target, ast.Subscript) else target
            add(others, getattr(key, "value", None) if key is not target else last_name(target), assigned.value)
    return options, others
