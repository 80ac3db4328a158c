"""Which lines a rehearsal came to, in a form that survives moves, and which of them a later one comes to no more."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256

import msgspec

from ddpdoctor.check import Check, LoadedCheck
from ddpdoctor.files.untrusted import line_of, tree_of
from ddpdoctor.finding import Finding, Location, Severity, plain, shown_path
from ddpdoctor.record.model import RunRecord

# A rehearsal no longer reaches code that it reached when the baseline was written.

CHECK = Check(code="DDP902", name="lost-reach", severity={"rehearsal": Severity.ERROR})
LOADED = LoadedCheck(check=CHECK, documentation=__doc__ or "")


def findings(lost: Iterable[Lost], against: str, root: str, update: str) -> Iterator[Finding]:
    """Yield one finding for each function that lost lines; ``update`` is the command that accepts them, if any."""
    for one in lost:
        place = f"{shown_path(one.location.file, root)}:{one.location.line}"
        where = f" in {one.function}" if one.function else ""
        lines = "a statement" if one.count == 1 else f"{one.count} statements"
        yield CHECK.finding(
            f"the rehearsal no longer reaches {lines}{where}, from {place} on",
            basis="rehearsal",
            remedy="Use script arguments or `--batches` with which it gets there"
            + (f", or accept it: `{update}`." if update else "."),
            locations=(one.location,),
            because=((f"{against} has {lines}{where} as reached", None, {"lines": one.count}),),
        )


Function = ast.FunctionDef | ast.AsyncFunctionDef
DIGITS = 6
"""Of a line's digest: two of the lines of one function are taken for each other once in 16 million."""
_LEAVING = (ast.Raise, ast.Return, ast.Pass, ast.Continue, ast.Break)
_DEFINING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal)
_NO_WORK = (*_LEAVING, *_DEFINING)


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """The lines of the project's files that some rank ran."""

    late: bool = False
    """Only those that ran after a model was wrapped or a loader drawn from are known."""
    ended: bool = True
    """The script ran to its own end."""
    lines: Mapping[str, Mapping[str, str]] = {}
    """By file, relative to the working directory, and function: the digests of its lines, ascending."""
    later: Mapping[str, Mapping[str, str]] = {}
    """The same of lines that were reached when only the clock decided how far the script would come."""
    partly: tuple[str, ...] = ()
    """Functions, as ``file:name``, that ran so much that only a part of what they did is known."""


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of one function that were reached before, and are there still."""

    location: Location
    function: str
    count: int
    """How many lines."""


def reach_of(record: RunRecord, root: str) -> Reach | None:
    """Return what was reached; None when it is not known."""
    if record.stream("lines").state != "complete" or not record.lines:
        return None
    run: dict[str, set[int]] = {}
    unwatched: dict[str, set[int]] = {}
    certain: dict[str, set[int]] = {}
    for row in record.lines:
        run.setdefault(row.file, set()).update(row.lines)
        unwatched.setdefault(row.file, set()).update(row.unwatched)
        certain.setdefault(row.file, set()).update(row.lines - row.by_chance)
    partly: set[str] = set()
    lines: dict[str, dict[str, str]] = {}
    later: dict[str, dict[str, str]] = {}
    for file in sorted(run):
        path = plain(shown_path(file, root))
        functions = _functions(file)
        if os.path.isabs(path) or functions is None:
            continue
        partly.update(f"{path}:{_around(functions, number + 1)}" for number in unwatched[file])
        lines[path] = _digests(file, functions, certain[file])
        later |= {path: found} if (found := _digests(file, functions, run[file] - certain[file])) else {}
    return Reach(
        late=any(row.late for row in record.lines),
        # torch 2.13 with gloo sometimes aborts a process whose script has reached its end.
        ended=all(rank.end == "finished" or rank.main_finished for rank in record.ranks),
        lines=lines,
        later=later,
        partly=tuple(sorted(partly)),
    )


def lost(before: Reach, now: Reach, root: str) -> Iterator[Lost]:
    """Yield, by function, the statements that were reached before, still stand there, and were not reached now.

    Nothing is known to be lost where only the later of two rehearsals misses what ran before training, and nothing
    is called lost that only leaves. What the clock decides counts only where both scripts reached their own end.
    """
    if now.late and not before.late:
        return
    whole = before.ended and now.ended
    for path in before.lines.keys() | (before.later.keys() if whole else ()):
        file = os.path.join(root, path)
        known = _functions(file)
        if known is None:
            continue
        agreed = _known(before.lines, path) | (_known(before.later, path) if whole else set())
        reached = _known(now.lines, path) | _known(now.later, path)
        by_name: dict[str, list[int]] = {}
        for number in _statements(file):
            name = _around(known, number)
            if (name, _digest(file, number)) in agreed - reached:
                by_name.setdefault(name, []).append(number)
        for name, numbers in sorted(by_name.items()):
            if numbers and f"{path}:{name}" not in now.partly:
                location = Location(file=file, line=numbers[0], function=name)
                yield Lost(location=location, function=name, count=len(numbers))


def _digests(file: str, functions: Sequence[tuple[int, int, str]], numbers: Iterable[int]) -> dict[str, str]:
    """By function the digests of some lines, ascending."""
    found: dict[str, set[str]] = {}
    for number in numbers:
        if digest := _digest(file, number):
            found.setdefault(_around(functions, number), set()).add(digest)
    return {name: " ".join(sorted(digests)) for name, digests in sorted(found.items())}


def _known(lines: Mapping[str, Mapping[str, str]], path: str) -> set[tuple[str, str]]:
    return {(name, digest) for name, digests in lines.get(path, {}).items() for digest in digests.split()}


def _functions(file: str) -> list[tuple[int, int, str]] | None:
    """First line, last line and qualified name of each function, inner ones later; None for what is no Python."""
    tree = tree_of(file)
    if tree is None:
        return None
    found: list[tuple[int, int, str]] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = f"{prefix}{child.name}"
                if isinstance(child, Function):
                    found.append((child.lineno, child.end_lineno or child.lineno, name))
                visit(child, f"{name}.")
            else:
                visit(child, prefix)

    visit(tree, "")
    return found


def _around(functions: Sequence[tuple[int, int, str]], number: int) -> str:
    """Return the innermost function around a line; empty at module level and for the line that defines it."""
    around = [entry for entry in functions if entry[0] < number <= entry[1]]
    return max(around, default=(0, 0, ""))[2]


def _statements(file: str) -> list[int]:
    """First lines of the statements that do something."""
    tree = tree_of(file)
    if tree is None:
        return []
    return sorted(
        {node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt) and not isinstance(node, _NO_WORK)}
    )


def _digest(file: str, number: int) -> str:
    code = "".join(line_of(file, number).split())
    return sha256(code.encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS] if code else ""
