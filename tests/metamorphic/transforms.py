"""Ways to write a program otherwise without changing what it does.

Each takes the files of a project by their names (``train.py`` is the entry) and gives other files, or None where it
does not apply. Nodes keep the numbers of the lines that they come from, so that findings can be compared.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from tests.index_of_checks import READ_IN_SOURCE

Files = dict[str, ast.Module]
Transform = Callable[[Files], "Files | None"]
WORDS = sorted(
    {word for words in READ_IN_SOURCE.values() for word in words} | {"accelerate", "lightning", "set_device"}
)
PROSE = (
    "Do not call " + ", ".join(WORDS) + ", filelock, FSDP, fully_shard, torchmetrics, autocast, SyncBatchNorm, nccl, "
    "gloo, deepspeed, average_gradients, set_default_device, requires_grad or MASTER_ADDR here: see the manual."
)
"""Ordinary English, with every word that some check looks for."""
_PROTOCOLS = frozenset(
    {"forward", "backward", "step", "setup", "configure_optimizers", "extra_repr", "set_epoch", "state_dict"}
    | {"load_state_dict", "zero_grad", "collate_fn", "write", "flush", "emit", "run"}
)
"""Methods that a library calls by their names."""
_Node = TypeVar("_Node", bound=ast.AST)


def in_comments(text: str) -> str:
    """Add comments of ordinary English; the lines keep their numbers but for one line before the first."""
    lines = (
        [line if _has_comment(line) else f"{line}  # {PROSE}" for line in text.split("\n")] if _is_flat(text) else []
    )
    return "\n".join([f"# {PROSE}", *(lines or text.split("\n"))])


def _has_comment(line: str) -> bool:
    return not line.strip() or "#" in line or line.rstrip().endswith("\\")


def _is_flat(text: str) -> bool:
    """Return whether no string goes over several lines, in which a comment would be text."""
    return '"""' not in text and "'''" not in text


def in_texts(files: Files) -> Files:
    """Say it in docstrings, in texts that are logged, and in those of exceptions."""
    return {name: _Texts().visit(tree) for name, tree in files.items()}


class _Texts(ast.NodeTransformer):
    def _documented(self, node: _Node) -> _Node:
        self.generic_visit(node)
        body: list[ast.stmt] = node.body  # type: ignore[attr-defined]
        if not body:
            return node
        if not (isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)):
            body.insert(0, ast.Expr(ast.Constant(PROSE)))
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        return self._documented(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        return self._documented(node)

    def visit_Module(self, node: ast.Module) -> ast.Module:
        return self._documented(node)

    def visit_Raise(self, node: ast.Raise) -> ast.Raise:
        call = node.exc
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id.endswith("Error"):
            call.args = [ast.Constant(PROSE)]
        return node


def renamed(files: Files) -> Files:
    """Give the user's variables, functions, parameters, attributes and classes names that mean nothing."""
    names = _own_names(files.values()) - _of_modules(files)
    if not names:
        return files  # Code that asks for its variables by name.
    new = {name: f"zb{number}" for number, name in enumerate(sorted(names))}
    attributes = {name: f"zc{number}" for number, name in enumerate(sorted(_own_attributes(files.values())))}
    callees = {
        node.name
        for tree in files.values()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
    return {name: _Renaming(new, attributes, callees).visit(tree) for name, tree in files.items()}


def _own_names(trees: Iterable[ast.Module]) -> set[str]:
    found: set[str] = set()
    foreign: set[str] = {"self", "cls", "_"}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                foreign |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.ExceptHandler):
                found |= {node.name} if node.name else set()
            elif isinstance(node, ast.ClassDef):
                # A field is read as an attribute, and given as a keyword.
                foreign |= _fields(node)
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not _is_method(tree, node):
                found.add(node.name)
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"globals", "locals", "vars", "eval"}:
                return set()
    return {name for name in found if not name.startswith("__")} - foreign - set(dir(builtins))


def _fields(cls: ast.ClassDef) -> set[str]:
    """Return the names that the body of a class gives a value or a type."""
    targets = [one.target for one in cls.body if isinstance(one, ast.AnnAssign)]
    values = [target for one in cls.body if isinstance(one, ast.Assign) for target in one.targets]
    return {target.id for target in (*targets, *values) if isinstance(target, ast.Name)}


def _of_modules(files: Files) -> set[str]:
    """Return what is taken from one of the program's modules by a dot, where its name stays."""
    modules = {Path(name).stem for name in files}
    nodes = (node for tree in files.values() for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id in modules}


def _is_method(tree: ast.AST, node: ast.AST) -> bool:
    return any(isinstance(cls, ast.ClassDef) and node in cls.body for cls in ast.walk(tree))


def _own_attributes(trees: Iterable[ast.Module]) -> set[str]:
    """Return attributes that the project's classes, which derive from nothing foreign by that name, give themselves."""
    found: set[str] = set()
    foreign: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                foreign |= _fields(node)
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("__"):
                        (foreign if node.bases else found).add(inner.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                own = node.value.id == "self" and isinstance(node.ctx, ast.Store)
                (found if own else foreign if node.value.id not in ("self",) else set()).add(node.attr)
            elif isinstance(node, ast.Attribute):
                foreign.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                foreign.add(node.value)
    return {name for name in found if not name.startswith("__")} - foreign - _PROTOCOLS


class _Renaming(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, str], attributes: Mapping[str, str], callees: set[str]) -> None:
        self.names, self.attributes, self.callees = names, attributes, callees
        self.methods: set[ast.AST] = set()

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self.names.get(node.id, node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        self.generic_visit(node)
        node.arg = self.names.get(node.arg, node.arg)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.Attribute:
        self.generic_visit(node)
        node.attr = self.attributes.get(node.attr, node.attr)
        return node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if name in self.callees or name == "partial":
            for entry in node.keywords:
                entry.arg = self.names.get(entry.arg or "", entry.arg or "") or None
        self.generic_visit(node)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        methods = self.attributes if node in self.methods else self.names
        node.name = methods.get(node.name, node.name)
        self.generic_visit(node)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        node.name = self.names.get(node.name, node.name)
        self.methods |= {part for part in node.body if isinstance(part, ast.FunctionDef)}
        self.generic_visit(node)
        return node

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.ExceptHandler:
        node.name = self.names.get(node.name, node.name) if node.name else None
        self.generic_visit(node)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        for alias in node.names:
            if alias.name in self.names:
                alias.name = self.names[alias.name]
        return node

    def visit_Global(self, node: ast.Global) -> ast.Global:
        node.names = [self.names.get(name, name) for name in node.names]
        return node

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.Nonlocal:
        node.names = [self.names.get(name, name) for name in node.names]
        return node


def aliased(files: Files) -> Files:
    """Import everything of libraries under another name."""
    return {name: _alias(tree, set(files)) for name, tree in files.items()}


def _alias(tree: ast.Module, own: set[str]) -> ast.Module:
    new: dict[str, str] = {}
    evaluated = {
        word
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "eval"
        for text in ast.walk(call)
        if isinstance(text, ast.Constant) and isinstance(text.value, str)
        for word in text.value.split(".")
    }
    """Names in a text that is evaluated, where they stay what they are."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and not node.level
            and f"{(node.module or '').replace('.', '/')}.py" not in own
        ):
            for alias in node.names:
                if alias.name != "*":
                    new[alias.asname or alias.name] = alias.asname = f"za_{alias.asname or alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                plain = alias.asname or "." not in alias.name
                if plain and f"{alias.name}.py" not in own and (alias.asname or alias.name) not in evaluated:
                    new[alias.asname or alias.name] = alias.asname = f"za_{(alias.asname or alias.name)}"
    dotted = {
        alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if not alias.asname
    }
    renaming = {name: alias for name, alias in new.items() if name not in dotted}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname and alias.asname.removeprefix("za_") in dotted:
                    alias.asname = None
        elif isinstance(node, ast.Name):
            node.id = renaming.get(node.id, node.id)
    return tree


def in_function(files: Files) -> Files | None:
    """Do in a function what the entry script does at its top level."""
    return _wrapped(files, lambda body: [_function("zd_main", body, ()), ast.Expr(_call(ast.Name("zd_main")))])


def in_class(files: Files) -> Files | None:
    """Do in a method of a class what the entry script does at its top level."""

    def wrap(body: list[ast.stmt]) -> list[ast.stmt]:
        cls = ast.ClassDef("ZdJob", [], [], [_function("zd_go", body, ("self",))], [])
        return [cls, ast.Expr(_call(ast.Attribute(_call(ast.Name("ZdJob")), "zd_go")))]

    return _wrapped(files, wrap)


def _wrapped(files: Files, wrap: Callable[[list[ast.stmt]], list[ast.stmt]]) -> Files | None:
    tree = files["train.py"]
    outside = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
    stays = [node for node in tree.body if isinstance(node, outside)]
    body = [node for node in tree.body if not isinstance(node, outside)]
    used = {node.id for part in stays for node in ast.walk(part) if isinstance(node, ast.Name)}
    stored = {
        node.id
        for part in body
        for node in ast.walk(part)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    special = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.ListComp, ast.Lambda, ast.GeneratorExp)
    if not body or any(isinstance(node, special) for part in body for node in ast.walk(part)):
        return None  # What these see of the variables around them differs in a function.
    if any(isinstance(node, ast.Name) and node.id == "__name__" for part in body for node in ast.walk(part)):
        return None
    shared = sorted(stored & used)
    tree.body = [*stays, *wrap([*([ast.Global(shared)] if shared else []), *body])]
    return files


def _function(name: str, body: list[ast.stmt], parameters: tuple[str, ...]) -> ast.FunctionDef:
    arguments = ast.arguments([], [ast.arg(name) for name in parameters], None, [], [], None, [])
    return ast.FunctionDef(name, arguments, body, [], None)


def _call(function: ast.expr) -> ast.Call:
    return ast.Call(function, [], [])


def split(files: Files) -> Files | None:
    """Move the entry's functions and classes that need nothing else of it into a module of their own."""
    tree = files["train.py"]
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    definitions = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    stored = {
        node.id
        for part in tree.body
        if part not in definitions
        for node in ast.walk(part)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    own = {node.name for node in definitions}
    used = {node.id for part in definitions for node in ast.walk(part) if isinstance(node, ast.Name)}
    special = any(
        isinstance(node, (ast.Global, ast.Call))
        and getattr(getattr(node, "func", None), "id", "spawn") in ("spawn", "globals")
        for part in definitions
        for node in ast.walk(part)
        if isinstance(node, ast.Global)
    )
    if not definitions or used & stored or own & stored or special or len(imports) + len(definitions) == len(tree.body):
        return None
    taken = ast.ImportFrom("zs_parts", [ast.alias(name) for name in sorted(own)], 0)
    rest = [node for node in tree.body if node not in definitions]
    place = max(rest.index(node) for node in imports) + 1 if imports else 0
    part = ast.Module([*imports, *definitions], [])
    return {**files, "train.py": ast.Module([*rest[:place], taken, *rest[place:]], []), "zs_parts.py": part}


def with_dead_code(files: Files) -> Files:
    """Add code before and after that never runs."""
    dead = ast.parse(
        "if False:\n    import zf_absent\n    zf_absent.barrier()\n    zf_absent.print_it('done')\n"
        "def zf_never(zf_a, zf_b):\n    for zf_c in zf_a:\n        zf_b = zf_b + zf_c\n    return zf_b\n"
    ).body
    for tree in files.values():
        future = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
        rest = [node for node in tree.body if node not in future]
        tree.body = [*future, *ast.parse(ast.unparse(dead[0])).body, *rest, *ast.parse(ast.unparse(dead[1])).body]
    return files


class _FormattedStrings(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        node.args = [ast.JoinedStr([one]) if _is_text(one) else one for one in node.args]
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.Subscript:
        self.generic_visit(node)
        if _is_text(node.slice):
            node.slice = ast.JoinedStr([node.slice])
        return node


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(node.value)


def formatted(files: Files) -> Files:
    """Write the strings that functions are given, and keys, as f-strings."""
    return {name: _FormattedStrings().visit(tree) for name, tree in files.items()}


class _Getattr(ast.NodeTransformer):
    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.ctx, ast.Load):
            return ast.Call(ast.Name("getattr"), [node.value, ast.Constant(node.attr)], [])
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        node.body = [self.visit(part) for part in node.body]
        return node  # Bases and decorators as they are.

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.body = [self.visit(part) for part in node.body]
        return node


def by_getattr(files: Files) -> Files:
    """Read attributes by ``getattr`` with their names."""
    return {name: _Getattr().visit(tree) for name, tree in files.items()}


class _Annotations(ast.NodeTransformer):
    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        target = node.targets[0]
        if len(node.targets) > 1 or not isinstance(target, (ast.Name, ast.Attribute)):
            return node
        declared = ast.AnnAssign(target, ast.Name("object"), node.value, int(isinstance(target, ast.Name)))
        return ast.copy_location(declared, node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        node.body = [part if isinstance(part, ast.Assign) else self.visit(part) for part in node.body]
        return node  # There an annotation declares a field.

    def visit_Module(self, node: ast.Module) -> ast.Module:
        if not any(isinstance(part, (ast.Global, ast.Nonlocal)) for part in ast.walk(node)):
            self.generic_visit(node)
        return node  # What is declared as global has no annotation.


def annotated(files: Files) -> Files:
    """Say of each variable of which type it is."""
    return {name: _Annotations().visit(tree) for name, tree in files.items()}


TRANSFORMS: Mapping[str, Transform] = {
    "texts": in_texts,
    "rename": renamed,
    "alias": aliased,
    "function": in_function,
    "class": in_class,
    "split": split,
    "dead code": with_dead_code,
    "f-strings": formatted,
    "getattr": by_getattr,
    "annotations": annotated,
}


def lines_of_origin(old: ast.Module, text: str) -> dict[int, int]:
    """Return for each line of a text that was made of a tree where its innermost statement began before."""
    found: dict[int, int] = {}
    waiting: list[tuple[ast.AST, ast.AST]] = [(old, ast.parse(text))]
    for before, after in waiting:  # Outer statements first, so that inner ones replace them.
        if isinstance(after, ast.stmt):
            line = getattr(before, "lineno", 0)
            found.update(dict.fromkeys(range(after.lineno, (after.end_lineno or after.lineno) + 1), line))
        waiting.extend(zip(ast.iter_child_nodes(before), ast.iter_child_nodes(after), strict=False))
    return found
