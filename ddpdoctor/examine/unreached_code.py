"""Names the code of the training that a rehearsal never came to: what a later step, epoch or the end would have run.

Only code whose turn was still to come is named: it stands in or behind the loop around a training step, is not guarded
by a condition that training cannot change, and does more than leave. Which branch a flag selects is no gap.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ddpdoctor.examination import Unreached
from ddpdoctor.files.untrusted import tree_of

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

Function = ast.FunctionDef | ast.AsyncFunctionDef
_TELLING = ("print", "info", "debug", "warning", "write", "set_description", "set_postfix", "destroy_process_group")
"""Calls whose absence is no gap."""
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_SETTINGS = {"self", "args", "config", "cfg", "opt", "opts", "hparams"}
"""Names that are handed around with the options of a run."""
_LEAVING = (ast.Raise, ast.Pass, ast.Continue, ast.Break, ast.Return, ast.Assert, ast.Global, ast.Nonlocal)


def unreached(record: RunRecord) -> tuple[Unreached, ...]:
    """Return the gaps of a rehearsal, by file and line; none when it is not known which lines were run."""
    if record.stream("lines").state != "complete":
        return ()
    run: dict[str, set[int]] = {}
    unwatched: dict[str, set[int]] = {}
    for row in record.lines:
        run.setdefault(row.file, set()).update(row.lines)
        unwatched.setdefault(row.file, set()).update(row.unwatched)
    found: set[Unreached] = set()
    for file, lines in _training_lines(record).items():
        tree = tree_of(file)
        if tree is not None and file in run:
            found.update(gaps(tree, file, frozenset(lines), frozenset(run[file]), frozenset(unwatched[file])))
    return tuple(sorted(found))


def gaps(
    tree: ast.Module, file: str, training: frozenset[int], run: frozenset[int], unwatched: frozenset[int] = frozenset()
) -> Iterator[Unreached]:
    """Yield the gaps of one file, given the lines through which training steps went and all lines that were run."""
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, Function)}
    for scope, inside in _scopes(tree, training):
        if isinstance(scope, Function) and _lines_that_define(scope) & unwatched:
            continue
        changing, known_from = _changing(scope), _known_from(scope, run | inside)
        for block, waits_for in _unreached_blocks(_still_to_come(scope, inside), run | inside, changing):
            if block[0].lineno >= known_from:
                yield _gap(file, scope, block, waits_for, functions)
    held = {scope for scope, _ in _scopes(tree, training)}
    for function, counters in _counting(tree, run):
        if function not in held and not _lines_that_define(function) & unwatched:
            for block, waits_for in _unreached_blocks(function.body, run, counters):
                if waits_for:
                    yield _gap(file, function, block, waits_for, functions)


def _gap(
    file: str,
    scope: ast.Module | Function,
    block: Sequence[ast.stmt],
    waits_for: str,
    functions: Mapping[str, Function],
) -> Unreached:
    called = [name for part in block for name in _called(part)]
    calls = dict.fromkeys(name for name in called if name.rpartition(".")[2] in functions) or called[:1]
    return Unreached(
        file=file,
        first_line=block[0].lineno,
        last_line=block[-1].end_lineno or block[-1].lineno,
        function=scope.name if isinstance(scope, Function) else "",
        calls=tuple(dict.fromkeys(name.removeprefix("self.") for name in calls)),
        waits_for=waits_for,
    )


def _counting(tree: ast.Module, run: frozenset[int]) -> Iterator[tuple[Function, frozenset[str]]]:
    """Yield the methods that were run, with the attributes in which their objects count up.

    A module that counts its forwards changes with the steps as a loop does, and so do its hooks and those of a trainer.
    """
    for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        counted = {
            node.target.attr
            for node in ast.walk(cls)
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute) and node.lineno in run
        }
        methods = [node for node in cls.body if isinstance(node, Function)]
        for method in methods if counted else ():
            if any(_was_run(statement, run) for statement in method.body):
                yield method, frozenset(counted)


def _training_lines(record: RunRecord) -> dict[str, set[int]]:
    """Return the user's lines on the call chains of optimizer steps and backwards, by file."""
    sites = {step.site for step in record.optimizer_steps} | {backward.site for backward in record.backwards}
    lines: dict[str, set[int]] = {}
    for site in sites:
        for frame in record.site(site).frames:
            lines.setdefault(frame.file, set()).add(frame.line)
    return lines


def _scopes(tree: ast.Module, training: frozenset[int]) -> Iterator[tuple[ast.Module | Function, frozenset[int]]]:
    """Yield the innermost functions, or the module, that hold training lines, with those lines."""
    held: dict[ast.Module | Function, set[int]] = {}
    functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
    for line in training:
        around = [node for node in functions if node.lineno <= line <= (node.end_lineno or node.lineno)]
        scope = max(around, key=lambda node: node.lineno, default=tree)
        held.setdefault(scope, set()).add(line)
    for scope, lines in held.items():
        yield scope, frozenset(lines)


def _still_to_come(scope: ast.Module | Function, training: frozenset[int]) -> list[ast.stmt]:
    """Return the statements of a function from the first loop around training on; all where a caller has the loop."""
    body = scope.body
    for index, statement in enumerate(body):
        if not any(_holds(statement, line) for line in training):
            continue
        if isinstance(statement, _LOOPS) or isinstance(scope, ast.Module) or _has_loop(statement, training):
            return body[index:]
        return body if _is_a_step(scope) else body[index:]
    return []


def _known_from(scope: ast.Module | Function, run: frozenset[int]) -> int:
    """Return the first line of a function that was seen to run: what stands before may have run unseen."""
    inner: set[int] = set()
    for node in ast.walk(scope):
        if isinstance(node, Function) and node is not scope:
            inner.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    first, last = (scope.lineno + 1, scope.end_lineno or 0) if isinstance(scope, Function) else (1, max(run, default=0))
    return min((line for line in run if first <= line <= last and line not in inner), default=last + 1)


def _has_loop(statement: ast.stmt, training: frozenset[int]) -> bool:
    loops = [node for node in ast.walk(statement) if isinstance(node, _LOOPS)]
    return any(_holds(loop, line) for loop in loops for line in training)


def _is_a_step(scope: ast.Module | Function) -> bool:
    """Return whether a function is one step of a loop elsewhere: it has parameters and no loop of its own."""
    return isinstance(scope, Function) and bool(scope.args.args) and not any(map(_is_loop, ast.walk(scope)))


def _is_loop(node: ast.AST) -> bool:
    return isinstance(node, _LOOPS)


_Block = tuple[list[ast.stmt], str]
"""Statements, and the condition that they wait for."""


def _unreached_blocks(
    body: Sequence[ast.stmt], run: frozenset[int], changing: frozenset[str], waits_for: str = ""
) -> Iterator[_Block]:
    block: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, _SCOPES) or _is_text(statement):
            continue
        if _was_run(statement, run):
            yield from _worth_naming(block, waits_for)
            block = []
            yield from _inside(statement, run, changing)
        else:
            block.append(statement)
    yield from _worth_naming(block, waits_for)


def _inside(statement: ast.stmt, run: frozenset[int], changing: frozenset[str]) -> Iterator[_Block]:
    if isinstance(statement, ast.If):
        varies, test = bool(_names(statement.test) & changing), ast.unparse(statement.test)
        for branch, condition in ((statement.body, test), (statement.orelse, f"not ({test})")):
            if branch and (varies or any(_was_run(part, run) for part in branch)):
                yield from _unreached_blocks(branch, run, changing, condition if varies else "")
    elif isinstance(statement, (*_LOOPS, ast.With, ast.AsyncWith)):
        yield from _unreached_blocks(statement.body, run, changing)
    elif isinstance(statement, ast.Try):
        yield from _unreached_blocks(statement.body, run, changing)
        yield from _unreached_blocks(statement.finalbody, run, changing)


def _worth_naming(block: list[ast.stmt], waits_for: str) -> Iterator[_Block]:
    if block and not all(isinstance(statement, _LEAVING) or _only_tells(statement) for statement in block):
        yield block, waits_for


def _was_run(statement: ast.stmt, run: frozenset[int]) -> bool:
    """Return whether a statement of several lines was run when any of them was."""
    return any(line in run for line in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))


def _changing(scope: ast.Module | Function) -> frozenset[str]:
    """Names and attributes that loops in a function bind: what a condition has to mention to change its mind."""
    found: set[str] = set()
    for loop in filter(_is_loop, ast.walk(scope)):
        for node in ast.walk(loop):
            if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
                found.add(node.id if isinstance(node, ast.Name) else node.attr)
    if _is_a_step(scope):
        for node in ast.walk(scope):
            if isinstance(node, ast.AugAssign):
                found |= _names(node.target)
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
                # Every so many steps, by a counter that the loop elsewhere passes on.
                found |= _names(node.left)
    return frozenset(found - _SETTINGS)


def _names(*nodes: ast.AST) -> set[str]:
    found = {getattr(part, "id", getattr(part, "attr", "")) for node in nodes for part in ast.walk(node)}
    return found - {""}


def _called(statement: ast.stmt) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name.replace(".", "").isidentifier():
                yield name


def _lines_that_define(scope: Function) -> set[int]:
    return {scope.lineno, *(decorator.lineno for decorator in scope.decorator_list)}


def _holds(statement: ast.AST, line: int) -> bool:
    first = getattr(statement, "lineno", 0)
    return bool(first <= line <= (getattr(statement, "end_lineno", None) or first))


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _only_tells(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    name = getattr(statement.value.func, "id", getattr(statement.value.func, "attr", ""))
    return name in _TELLING
