"""Makes edits in files: the rest of a file stays as it is, its encoding, line ends and mode included."""

from __future__ import annotations

import ast
import difflib
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ddpdoctor.errors import DdpDoctorError, UsageError
from ddpdoctor.files.replace_file import replace_file
from ddpdoctor.files.source_text import MAXIMUM_BYTES as _LARGEST_BYTES
from ddpdoctor.files.source_text import decoded
from ddpdoctor.files.untrusted import read_untrusted
from ddpdoctor.fix.edits import Edit, Fix

_LINE_END = re.compile("\r\n|\r|\n")


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
    lines = difflib.unified_diff(before, after, f"a/{shown}", f"b/{shown}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def write(rewritten: Rewritten) -> None:
    """Put the new content in the file's place, at once and with the file's mode; links to it stay links.

    Raises UsageError when the file was changed meanwhile, is read-only, or cannot be written.
    """
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
