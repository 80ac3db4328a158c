"""What a fix is, and the edits that checks make fixes of.

A check's module may hold a function beside ``in_source``::

    def fixes(script: Script, finding: Finding) -> Iterator[Fix]: ...

It gets each finding that ``in_source`` yielded for the script and is not suppressed.
"""

from __future__ import annotations

import ast
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from ddpdoctor.errors import DdpDoctorError, UsageError
from ddpdoctor.files import regex
from ddpdoctor.files.untrusted import MAXIMUM_BYTES as _LARGEST_BYTES
from ddpdoctor.files.untrusted import decoded, read_untrusted
from ddpdoctor.finding import Finding, Location
from ddpdoctor.source.script.module import Module, Node
from ddpdoctor.source.vocabulary import canonical

if TYPE_CHECKING:
    from ddpdoctor.source.script.script import Script


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


def fix_of(finding: Finding, description: str, *edits: Edit | None, safe: bool = False) -> Iterator[Fix]:
    """Yield the fix of a finding that some edits are together; none where one of them cannot be made."""
    made = tuple(edit for edit in edits if edit is not None)
    if finding.location is not None and len(made) == len(edits):
        yield Fix(code=finding.code, description=description, location=finding.location, edits=made, safe=safe)


def node_at(script: Script, finding: Finding, kind: type[Node]) -> tuple[Module, Node] | None:
    """Return the call, or other expression, that a finding is about, by its place, with its module."""
    place = finding.location
    if place is None:
        return None
    for module in script.modules:
        for node in module.index.of(kind) if str(module.path) == place.file else ():
            if getattr(node, "lineno", 0) == place.line and module.location(node) == place:
                return module, node
    return None


def instead(module: Module, node: ast.AST, text: str) -> Edit:
    """Write ``text`` over a node."""
    place = module.location(node)
    start, end = (place.line, place.column), (place.end_line, place.end_column)
    return Edit(
        file=str(module.path), line=start[0], column=start[1], end_line=end[0], end_column=end[1], replacement=text
    )


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
    arguments: list[ast.expr | ast.keyword] = sorted(
        [*call.args, *call.keywords], key=lambda node: (node.lineno, node.col_offset)
    )
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


def _in_parentheses(module: Module, call: ast.Call, last: ast.expr) -> bool:
    """Return whether something other than a comma and the closing parenthesis follows the last argument: ``f((a))``."""
    place, end = module.location(last), module.location(call)
    if isinstance(last, ast.GeneratorExp):
        return True
    if place.end_line != end.end_line:
        return False
    rest = module.lines[place.end_line - 1][place.end_column - 1 : end.end_column - 2]
    return rest.replace(",", "", 1).strip() != ""


# Makes edits in files: the rest of a file stays as it is, its encoding, line ends and mode included.

_LINE_END = regex("\r\n|\r|\n")


class Rewritten(msgspec.Struct, frozen=True, kw_only=True):
    """A file before and after its fixes."""

    file: str
    """Absolute path."""
    before: bytes
    after: bytes
    fixes: tuple[Fix, ...]


class CannotRewrite(DdpDoctorError):
    """The edits do not fit the file, or what they make of it is no Python."""


def rewrite(fixes: Iterable[Fix], held: Mapping[str, bytes] | None = None) -> tuple[list[Rewritten], list[Fix]]:
    """Make the fixes in memory, file by file; also returns those that could not be made.

    Of fixes that overlap the first is made. A fix that reaches into several files is not made. ``held`` has the content
    of files that are not to be read from the disk.
    """
    by_file: dict[str, list[Fix]] = {}
    left: list[Fix] = []
    for fix in fixes:
        files = {edit.file for edit in fix.edits}
        if len(files) == 1:
            by_file.setdefault(files.pop(), []).append(fix)
        else:
            left.append(fix)
    done: list[Rewritten] = []
    for file, wanted in sorted(by_file.items()):
        try:
            before = held[file] if held and file in held else read_untrusted(file, _LARGEST_BYTES)
        except OSError:
            left.extend(wanted)
            continue
        after, made = before, list[Fix]()
        for fix in wanted:
            try:
                after = edited(before, [edit for one in (*made, fix) for edit in one.edits])
            except CannotRewrite:
                left.append(fix)
            else:
                made.append(fix)
        if after != before:
            done.append(Rewritten(file=file, before=before, after=after, fixes=tuple(made)))
    return done, left


def edited(raw: bytes, edits: Sequence[Edit]) -> bytes:
    """Make edits, equal ones once, in the bytes of a Python file.

    Raises CannotRewrite when edits overlap or lie outside of the file, and when the result would not parse or cannot be
    written in the encoding of the file.
    """
    try:
        text, encoding = decoded(raw)
    except (SyntaxError, ValueError) as error:
        raise CannotRewrite(f"the file cannot be read: {error}") from error
    starts = [0, *(match.end() for match in _LINE_END.finditer(text))]
    newline = _newline(text)
    pieces: list[str] = []
    position = 0
    for edit in sorted(set(edits)):
        start = _offset(text, starts, edit.line, edit.column)
        end = _offset(text, starts, edit.end_line, edit.end_column)
        if start < position or end < start:
            raise CannotRewrite("edits overlap")
        pieces += [text[position:start], edit.replacement.replace("\n", newline)]
        position = end
    result = "".join(pieces) + text[position:]
    try:
        changed = result.encode(encoding)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(changed)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CannotRewrite(f"the edited file would not parse: {error}") from error
    return changed


def difference(rewritten: Rewritten, shown: str) -> str:
    """Return a unified diff of one file under the name ``shown``."""
    before, after = (_split(content) for content in (rewritten.before, rewritten.after))
    from difflib import unified_diff  # 1 ms of every check that mends nothing.

    lines = unified_diff(before, after, f"a/{shown}", f"b/{shown}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def write(rewritten: Rewritten) -> None:
    """Put the new content in the file's place, at once and with the file's mode; links to it stay links.

    Raises UsageError when the file was changed meanwhile, is read-only, or cannot be written.
    """
    from ddpdoctor.files.replace_file import replace_file

    path = os.path.realpath(rewritten.file)
    changed = f"{rewritten.file} was changed during the examination; it was not edited"
    try:
        before = os.stat(path)
        if not before.st_mode & 0o222:
            raise UsageError(f"{rewritten.file} is read-only; it was not edited", "`chmod u+w` lets it be edited.")
        if read_untrusted(path, _LARGEST_BYTES) != rewritten.before:
            raise UsageError(changed)
        replace_file(path, rewritten.after, before)
    except FileExistsError as error:
        raise UsageError(changed) from error
    except OSError as error:
        raise UsageError(f"cannot write {rewritten.file}: {error.strerror or error}") from error


def _offset(text: str, starts: Sequence[int], line: int, column: int) -> int:
    if not 0 < line <= len(starts) or column < 1:
        raise CannotRewrite("an edit lies outside of the file")
    offset = starts[line - 1] + column - 1
    if offset > (starts[line] if line < len(starts) else len(text)):
        raise CannotRewrite("an edit lies outside of its line")
    return offset


def _newline(text: str) -> str:
    found = _LINE_END.findall(text)
    return max(("\n", "\r\n", "\r"), key=found.count)


def _split(content: bytes) -> list[str]:
    text, encoding = decoded(content)
    if encoding == "utf-8-sig":
        text = content.decode("utf-8")
    return [re.sub("\r\\Z", "\n", line) for line in re.findall("[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", text)]
