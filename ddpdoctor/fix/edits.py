"""What a fix is, and the edits that checks make fixes of.

A check's module may hold a function beside ``in_source``::

    def fixes(script: Script, finding: Finding) -> Iterator[Fix]: ...

It gets each finding that ``in_source`` yielded for the script and is not suppressed.
"""

from __future__ import annotations

import ast

import msgspec

from ddpdoctor.finding import Location
from ddpdoctor.source.script.module import Module
from ddpdoctor.source.vocabulary import canonical


class Edit(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """A region of a file and the text in its place; 1-based, columns in characters, ``end_column`` exclusive."""

    file: str
    """Absolute path."""
    line: int
    column: int
    end_line: int
    end_column: int
    replacement: str
    """Line ends are ``\\n``; the file's own are written."""


class Fix(msgspec.Struct, frozen=True, kw_only=True):
    """Edits that belong together: all are made, or none."""

    code: str
    """Of the check."""
    description: str
    """What is done, in the imperative: ``call sampler.set_epoch(epoch)``."""
    location: Location
    """The primary location of the finding that it fixes."""
    edits: tuple[Edit, ...]
    safe: bool
    """It only does what the finding asks for; a fix that may change what else the script does is shown, not made."""


def insertion(module: Module, line: int, column: int, text: str) -> Edit:
    """Insert ``text`` before a place; the column is 1-based and in characters."""
    return Edit(file=str(module.path), line=line, column=column, end_line=line, end_column=column, replacement=text)


def after(module: Module, node: ast.expr, text: str) -> Edit:
    """Insert ``text`` right behind an expression, inside of the parentheses around it: ``after(test, "()")``."""
    place = module.location(node)
    return insertion(module, place.end_line, place.end_column, text)


def with_keyword(module: Module, call: ast.Call, name: str, value: str) -> Edit | None:
    """Give a call one more keyword argument behind the others; None where it has it, or may have it in ``**``."""
    if any(keyword.arg in (name, None) for keyword in call.keywords):
        return None
    arguments: list[ast.expr] = [*call.args, *(keyword.value for keyword in call.keywords)]
    if not arguments:
        place = module.location(call)
        return insertion(module, place.end_line, place.end_column - 1, f"{name}={value}")
    last = max(arguments, key=lambda node: (node.end_lineno or 0, node.end_col_offset or 0))
    if _in_parentheses(module, call, last):
        return None
    return after(module, last, f", {name}={value}")


def without_keyword(module: Module, call: ast.Call, name: str) -> Edit | None:
    """Take a keyword argument out of a call, with the comma that belonged to it; None where it has none of the name."""
    arguments: list[ast.expr | ast.keyword] = sorted([*call.args, *call.keywords], key=_position)
    wanted = next((node for node in call.keywords if node.arg == name), None)
    if wanted is None:
        return None
    place, index = module.location(wanted), arguments.index(wanted)
    start, end = (place.line, place.column), (place.end_line, place.end_column)
    if index:
        before = module.location(arguments[index - 1])
        start = (before.end_line, before.end_column)
    elif len(arguments) > 1:
        following = module.location(arguments[1])
        end = (following.line, following.column)
    return Edit(
        file=str(module.path), line=start[0], column=start[1], end_line=end[0], end_column=end[1], replacement=""
    )


def imported(module: Module, name: str) -> tuple[str, tuple[Edit, ...]] | None:
    """Return how a module can call something of a library, by its full name, and the import that it needs for that.

    None where no import stands at the top of the file, or the name is something else there.
    """
    for local, full in module.aliases.items():
        if canonical(full) == name:
            return local, ()
        if name.startswith(f"{full}.") and full == name.rpartition(".")[0]:
            return f"{local}.{name.rpartition('.')[2]}", ()
    package, _, last = name.rpartition(".")
    statements = [node for node in module.tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    beside = [node for node in statements if _top_package(node) == package.partition(".")[0]]
    first = next((node for node in (*beside, *statements) if _top_package(node) != "__future__"), None)
    if first is None or last in module.words or module.column(first.lineno, first.col_offset) != 1:
        return None
    return last, (insertion(module, first.lineno, 1, f"from {package} import {last}\n"),)


def _top_package(node: ast.Import | ast.ImportFrom) -> str:
    name = (node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name
    return name.partition(".")[0]


def indented(module: Module, first: ast.stmt, last: ast.stmt, head: str) -> tuple[Edit, ...] | None:
    """Put statements under a new head such as ``with context:``; None where moving them would change a text in them."""
    lines = range(first.lineno, (last.end_lineno or last.lineno) + 1)
    opening = first_in_body(module, [first], head)
    if opening is None or module.lines[lines[-1] - 1][module.location(last).end_column - 1 :].lstrip()[:1] == ";":
        return None
    for node in module.nodes:
        if isinstance(node, (ast.Constant, ast.JoinedStr)) and node.lineno in lines and node.end_lineno != node.lineno:
            return None
    step = "\t" if opening.replacement.startswith("\t") else "    "
    moved = (insertion(module, line, 1, step) for line in lines if module.lines[line - 1].strip())
    return (msgspec.structs.replace(opening, replacement=opening.replacement + step), *list(moved)[1:])


def first_in_body(module: Module, body: list[ast.stmt], statement: str) -> Edit | None:
    """Put a statement before the first of a body; None when the body stands on the line of its head."""
    first = body[0]
    line = min([first.lineno, *(node.lineno for node in getattr(first, "decorator_list", ()))])
    text = module.lines[line - 1]
    indentation = text[: len(text) - len(text.lstrip())]
    if module.column(first.lineno, first.col_offset) != len(indentation) + 1:
        return None
    return insertion(module, line, 1, f"{indentation}{statement}\n")


def _position(node: ast.expr | ast.keyword) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _in_parentheses(module: Module, call: ast.Call, last: ast.expr) -> bool:
    """Return whether something other than a comma and the closing parenthesis follows the last argument: ``f((a))``."""
    place, end = module.location(last), module.location(call)
    if isinstance(last, ast.GeneratorExp):
        return True
    if place.end_line != end.end_line:
        return False
    rest = module.lines[place.end_line - 1][place.end_column - 1 : end.end_column - 2]
    return rest.replace(",", "", 1).strip() != ""
