"""What a project writes down: the paths and names that expressions give, and the files that start its jobs."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, product
from pathlib import Path

from ddpdoctor.files import regex
from ddpdoctor.files.patterns import home_directory
from ddpdoctor.source.script.launch_facts import destination
from ddpdoctor.source.script.module import (
    Module,
    absolute,
    argument_of,
    descend,
    dotted,
    last_name,
    once,
    parameters_of,
)

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
    for expression in _added(module):
        for _, given in given_for(module, expression, (module,)):
            text = written_path(module, given)
            for base in bases if text else ():
                place = Path(os.path.normpath(base / text))
                if place != place.parent and place.is_dir():
                    yield place


def _added(module: Module) -> Iterator[ast.expr]:
    """Yield the expressions that are added."""
    for call in module.index.of(ast.Call):
        name = module.resolve(call.func)
        if name in _ADDS and len(call.args) > _ADDS[name]:
            yield call.args[_ADDS[name]]
        elif name == "sys.path.extend" and call.args:
            yield from _entries(call.args[0])
    for statement in module.index.of(ast.AugAssign):
        if module.resolve(statement.target) == "sys.path":
            yield from _entries(statement.value)


def _entries(expression: ast.expr) -> Sequence[ast.expr]:
    return expression.elts if isinstance(expression, (ast.List, ast.Tuple)) else ()


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
_IN_EACH_OTHER = 3
"""How often variables are put into each other: ``ROOT``, ``SCRIPT=$ROOT/train.py``, ``LAUNCH="torchrun $SCRIPT"``."""
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


_SET = regex(r"""^[ \t]*(?:export[ \t]+)?(\w+)=(?:"([^"\n`]*)"|'([^'\n]*)'|([^\s"'`;|&$()]+))[ \t]*(?:\#.*)?$""", re.M)


def commands_beside(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield the same, with the variables of a shell script put in that it sets once, to what is written there.

    ``METHOD=unimatch`` and ``torchrun $METHOD.py`` start ``unimatch.py``.
    """
    for path, text in texts_beside(root):
        values: dict[str, set[str]] = {}
        for found in _SET.finditer(text) if "$" in text else ():
            values.setdefault(found[1], set()).add(next((value for value in found.groups()[1:] if value), ""))
        known = {name: one.pop() for name, one in values.items() if len(one) == 1}
        yield path, _put_in(text, known)


def _put_in(text: str, known: Mapping[str, str]) -> str:
    for _ in range(_IN_EACH_OTHER if known else 0):
        text = re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda one: known.get(one[1] or one[2], one[0]), text)
    return text


def _files(directory: Path, levels: int) -> Iterator[Path]:
    try:
        entries = sorted(directory.iterdir())
    except OSError:
        return
    yield from (entry for entry in entries if _LAUNCH_FILES.search(entry.name) and entry.is_file())
    for entry in entries if levels else ():
        if not entry.name.startswith(".") and entry.is_dir() and not entry.is_symlink():
            yield from _files(entry, levels - 1)


# Names of code that are put together, as ``f"models.{args.model}"``, and the settings that are parts of them.

UNKNOWN_PART = "\0"
"""Stands in a text for a part that is not known."""
MOST_TEXTS = 16
"""Texts that one expression may have: each setting in it mostly has one default."""
_FIELD = regex(r"%[a-z]|\{[^{}]*\}")


def spelled(node: ast.expr, of_part: Callable[[ast.expr], Collection[str]]) -> Collection[str]:
    """Return the texts that an expression puts together; ``of_part`` gives those of parts that are not written out."""
    if isinstance(node, ast.Constant):
        return (str(node.value),)
    parts = list(_filled(node))
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.FormattedValue) else part for part in node.values]
    first = node
    while isinstance(first, ast.BinOp) and isinstance(first.op, ast.Add):  # A sum is as deep as it has terms.
        parts.insert(0, first.right)
        first = first.left
    if not parts:
        return of_part(node)
    if first is not node:
        parts.insert(0, first)
    return ["".join(texts) for texts in islice(product(*(spelled(part, of_part) for part in parts)), MOST_TEXTS)]


def _filled(node: ast.expr) -> Sequence[ast.expr]:
    """Return the texts and the fields of ``"a.%s" % b``, ``"a.{}".format(b)`` or ``".".join([a, b])``; else nothing."""
    template: ast.expr | None = None
    given: Sequence[ast.expr] = ()
    joined = argument_of(node, "iterable", 0) if last_name(getattr(node, "func", node)) == "join" else None
    between = getattr(getattr(node, "func", None), "value", None)
    if isinstance(joined, (ast.List, ast.Tuple)) and isinstance(between, ast.Constant):
        return [part for one in joined.elts for part in (between, one)][1:]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        template, given = node.left, node.right.elts if isinstance(node.right, ast.Tuple) else [node.right]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        template, given = node.func.value, [*node.args, *(word.value for word in node.keywords)]
    if not isinstance(template, ast.Constant) or not isinstance(template.value, str):
        return ()
    first, *texts = _FIELD.split(template.value)
    in_order = len(texts) == 1 or all(len(field) == 2 for field in _FIELD.findall(template.value))
    if len(given) != len(texts) or not in_order:
        given = [ast.Constant(UNKNOWN_PART)] * len(texts)
    return [
        ast.Constant(first),
        *(part for field, text in zip(given, texts, strict=True) for part in (field, ast.Constant(text))),
    ]


def template_of(module: Module, node: ast.expr, depth: int = 0) -> str:
    """Return a text that is put together, with ``UNKNOWN_PART`` for each part that is not written out."""

    def of_part(part: ast.expr) -> Collection[str]:
        own = {"__name__": module.name, "__package__": module.package}.get(last_name(part))
        if own is not None:
            return (own,)
        named = isinstance(part, ast.Name) and not depth
        values = module.assigned(module.body_around(part), part) if named else ()
        return (template_of(module, values[0], depth + 1) if len(values) == 1 else UNKNOWN_PART,)

    return next(iter(spelled(node, of_part)))


def may_be(template: str, name: str) -> bool:
    """Return whether a text with parts that are not known may be a name; it has as many dots."""
    first, *texts = template.split(UNKNOWN_PART)
    if not texts or name.count(".") != template.count("."):
        return name == template
    place = len(first) if name.startswith(first) else -1
    for text in texts[:-1]:  # The first fit leaves most: no regular expression, which tries every other one, too.
        place = -1 if place < 0 or (found := name.find(text, place)) < 0 else found + len(text)
    return 0 <= place <= len(name) - len(texts[-1]) and name.endswith(texts[-1])


def imports_by_name(module: Module) -> Sequence[ast.Call]:
    """Return the calls that import a module by its name."""
    names = [name for name in ("import_module", "__import__") if name in module.text]
    return [call for name in names for call in module.calls_by_name.get(name, ()) if call.args]


def given_for(module: Module, expression: ast.expr, callers: Iterable[Module]) -> Iterator[tuple[Module, ast.expr]]:
    """Yield an expression, with its module; of a parameter, what calls of its function in some modules pass for it."""
    function = module.body_around(expression)
    names = parameters_of(function) if isinstance(function, ast.FunctionDef) else []
    if not isinstance(expression, ast.Name) or expression.id not in names or not isinstance(function, ast.FunctionDef):
        yield module, expression
        return
    place = names.index(expression.id) - (names[0] == "self")
    for caller in callers:
        for call in caller.calls_by_name.get(function.name, ()) if function.name in caller.text else ():
            if (given := argument_of(call, expression.id, place)) is not None:
                yield caller, given


def registers(module: Module, call: ast.AST) -> bool:
    """Return whether a module is imported for what it registers: nothing is made of it, but for a list of such."""
    return isinstance(module.parents.get(call), (ast.Expr, ast.ListComp))


def absolute_name(module: Module, call: ast.AST, name: str) -> str:
    """Return the name of the module that a call imports, where it may be relative to a package that the call is given.

    >>> import_module("." + name, package=__package__)
    """
    level = len(name) - len(name.lstrip("."))
    package = argument_of(call, "package", 1)
    base = package.value if isinstance(package, ast.Constant) else module.package
    return absolute(name[level:], level, str(base))


def defaults_of(modules: Sequence[Module], name: object) -> Collection[str]:
    """Return the texts that a setting of a name has by default: as an option of the command line, or else elsewhere."""
    found = [{text for module in modules for text in _defaults(module)[kind].get(name, ())} for kind in (0, 1)]
    return found[0] or found[1]


@once
def _defaults(module: Module) -> tuple[Mapping[object, set[str]], Mapping[object, set[str]]]:
    """Return the texts by which a module sets options by default, and those in its dicts, fields and attributes."""
    index = module.index
    options = [
        # Of argparse and click by their flags, of absl by their names.
        (first.value, argument_of(call, "default", 1))
        if last_name(call.func).startswith("DEFINE_")
        else (destination(call), argument_of(call, "default"))
        for call in index.of(ast.Call)
        if isinstance(first := call.args[0] if call.args else None, ast.Constant)
    ]
    others: list[tuple[object, ast.expr | None]] = [
        (getattr(key, "value", 0), one)
        for table in index.of(ast.Dict)
        for key, one in zip(table.keys, table.values, strict=True)
    ]
    assigned = [(to, one.value) for one in index.of(ast.Assign) for to in one.targets]
    for target, value in (*assigned, *((one.target, one.value) for one in index.of(ast.AnnAssign))):
        # A function's variable is no setting.
        if isinstance(target, ast.Attribute) or isinstance(module.body_around(target), ast.Module):
            others.append((last_name(target), value))
    return _texts(options), _texts(others)


def _texts(settings: Iterable[tuple[object, ast.AST | None]]) -> Mapping[object, set[str]]:
    found: dict[object, set[str]] = {}
    for name, value in settings:
        if isinstance(name, str) and isinstance(value, ast.Constant) and isinstance(value.value, str):
            found.setdefault(name, set()).add(value.value)
    return found
