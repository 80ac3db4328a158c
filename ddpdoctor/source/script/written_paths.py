"""What a project writes down beside its modules: the paths that expressions give, and the files that start its jobs."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path

from ddpdoctor.files import regex
from ddpdoctor.files.patterns import home_directory
from ddpdoctor.source.script.module import Module, descend, dotted, last_name, once

# Directories that modules add to `sys.path`: `sys.path.append(os.path.join(os.path.dirname(__file__), "lib"))`.

# Calls that add one directory, and which argument names it.
_ADDS = {"sys.path.append": 0, "sys.path.insert": 1, "site.addsitedir": 0}
_UNCHANGED = frozenset({"abspath", "realpath", "normpath", "expanduser", "resolve", "absolute", "as_posix", "str"})
_SAME_AS_TEXT = frozenset({"str", "fspath", "Path", "PurePath"})
# Nested expressions further down are no path.
_DEEPEST = 20


def added_directories(module: Module, bases: Sequence[Path]) -> Iterator[Path]:
    """Yield existing directories that a module adds to ``sys.path``, as far as its text shows which.

    A relative one is looked for below each of ``bases``, for the job may start in any of them.
    """
    if "sys.path" not in module.text and "addsitedir" not in module.text:
        return
    for expression, function in _added(module):
        for given in _given(module, expression, function):
            text = written_path(module, given)
            for base in bases if text else ():
                place = Path(os.path.normpath(base / text))
                if place != place.parent and place.is_dir():
                    yield place


def _added(module: Module) -> Iterator[tuple[ast.expr, ast.AST]]:
    """Yield the expressions that are added, each with the function (or the tree) around it."""
    for call in module.index.of(ast.Call):
        name = module.resolve(call.func)
        if name in _ADDS and len(call.args) > _ADDS[name]:
            yield call.args[_ADDS[name]], module.body_around(call)
        elif name == "sys.path.extend" and call.args:
            yield from ((one, module.body_around(call)) for one in _entries(call.args[0]))
    for statement in module.index.of(ast.AugAssign):
        if module.resolve(statement.target) == "sys.path":
            yield from ((one, module.body_around(statement)) for one in _entries(statement.value))


def _entries(expression: ast.expr) -> Sequence[ast.expr]:
    return expression.elts if isinstance(expression, (ast.List, ast.Tuple)) else ()


def _given(module: Module, expression: ast.expr, function: ast.AST) -> Iterator[ast.expr]:
    """Yield an expression; of a parameter, what the function's calls in the module pass for it."""
    names = [one.arg for one in function.args.args] if isinstance(function, ast.FunctionDef) else []
    if not isinstance(expression, ast.Name) or expression.id not in names or not isinstance(function, ast.FunctionDef):
        yield expression
        return
    position = names.index(expression.id)
    for call in module.calls_by_name.get(function.name, ()):
        if len(call.args) > position:
            yield call.args[position]


@once
def _assigned(module: Module) -> Mapping[str, ast.expr]:
    """Return what variables of a module are set to, where that is one expression; also those of its functions."""
    values: dict[str, list[ast.expr]] = {}
    for node in module.index.of(ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Name):
                values.setdefault(target.id, []).append(node.value)
    return {name: found[0] for name, found in values.items() if len(found) == 1}


def written_path(module: Module, node: ast.AST) -> str:
    """Return the path that an expression of a module gives; empty where the text does not show it."""
    return _path(module, node, _assigned(module), 0)


def _path(module: Module, node: ast.AST, variables: Mapping[str, ast.expr], depth: int) -> str:
    """Return the path that an expression gives; empty where the text does not show it."""
    if depth > _DEEPEST:
        return ""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.Name):
        if node.id == "__file__":
            return str(module.path)
        known = variables.get(node.id)
        recursive = known is not None and any(isinstance(n, ast.Name) and n.id == node.id for n in descend(known))
        return "" if known is None or recursive else _path(module, known, variables, depth + 1)
    if isinstance(node, ast.Attribute):
        if dotted(node).endswith(("path.pardir", "os.pardir")):
            return os.pardir
        inner = _path(module, node.value, variables, depth + 1) if node.attr == "parent" else ""
        return os.path.dirname(inner)
    if isinstance(node, ast.Subscript):
        return _subscript(module, node, variables, depth)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.Add)):
        left, right = (_path(module, side, variables, depth + 1) for side in (node.left, node.right))
        if not left or not right:
            return ""
        return os.path.join(left, right) if isinstance(node.op, ast.Div) else left + right
    return _call(module, node, variables, depth) if isinstance(node, ast.Call) else ""


def _subscript(module: Module, node: ast.Subscript, variables: Mapping[str, ast.expr], depth: int) -> str:
    """Return the path of ``path.parents[n]`` or ``os.path.split(path)[0]``."""
    number = node.slice.value if isinstance(node.slice, ast.Constant) else None
    if not isinstance(number, int):
        return ""
    if isinstance(node.value, ast.Attribute) and node.value.attr == "parents":
        parents = Path(_path(module, node.value.value, variables, depth + 1)).parents
        return str(parents[number]) if 0 <= number < len(parents) else ""
    if isinstance(node.value, ast.Call) and dotted(node.value.func).endswith("path.split") and node.value.args:
        return (
            os.path.split(_path(module, node.value.args[0], variables, depth + 1))[number] if number in (0, 1) else ""
        )
    return ""


def _call(module: Module, node: ast.Call, variables: Mapping[str, ast.expr], depth: int) -> str:
    """Return what a function of ``os.path`` or of a path object makes of its arguments."""
    name = last_name(node.func)
    if name == "getcwd" or name == "cwd":
        return os.curdir
    arguments = [_path(module, one, variables, depth + 1) for one in node.args]
    if not all(arguments):
        return ""
    if name == "join" and arguments:
        return os.path.join(*arguments)
    if name == "dirname" and arguments:
        return os.path.dirname(arguments[0])
    if (name in _UNCHANGED or name in _SAME_AS_TEXT) and arguments:
        return arguments[0]
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    if owner is not None and (name in _UNCHANGED or name in {"joinpath", "parent"}):
        whole = _path(module, owner, variables, depth + 1)
        return os.path.join(whole, *arguments) if whole else ""
    return ""


LEVELS_DOWN = 2
"""How far below the project's root such files are looked for: ``deploy/kubernetes/job.yaml``."""
MOST_FILES, MOST_BYTES = 60, 200_000
_LAUNCH_FILES = regex(r"^readme|^requirements.*\.txt$|\.(sh|slurm|sbatch|ya?ml)$", re.IGNORECASE)


def texts_beside(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files of a project that say how its jobs are started, with what they hold."""
    beside = _files(root.parent, 0) if root.parent != home_directory() else ()  # The README next to ``src``.
    for path in islice(chain(beside, _files(root, LEVELS_DOWN)), MOST_FILES):
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                yield path, file.read(MOST_BYTES)
        except OSError:
            continue


def _files(directory: Path, levels: int) -> Iterator[Path]:
    try:
        entries = sorted(directory.iterdir())
    except OSError:
        return
    yield from (entry for entry in entries if _LAUNCH_FILES.search(entry.name) and entry.is_file())
    for entry in entries if levels else ():
        if not entry.name.startswith(".") and entry.is_dir() and not entry.is_symlink():
            yield from _files(entry, levels - 1)
