"""What kind of number a variable holds, by how it was computed: a mean of a batch, or a sum or count over it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence, Set
from typing import Literal

from ddpdoctor.source.queries.divergence import mentions
from ddpdoctor.source.script.module import Module, last_name

NumberKind = Literal["mean", "sum", "unknown"]
_AS_IT_IS = frozenset({"item", "detach", "cpu", "clone", "float", "double", "to", "cuda", "squeeze", "view", "reshape"})
"""Methods of a tensor whose result is the same number."""
_MADE_OF = frozenset({"tensor", "as_tensor", "Tensor", "FloatTensor", "float", "full", "stack", "cat"})
"""Functions that make a tensor or a number of one that they are given."""
_SUMS = frozenset({"sum", "numel", "size", "len", "count_nonzero", "nansum"})
_MEANS = frozenset({"mean", "nanmean"})
_LOSSES = ("loss", "entropy", "kl_div")
"""In the names of the functions of torch.nn.functional, and of the classes of torch.nn, that give a mean by default."""
SHOWS = frozenset(
    {
        *("print", "info", "log", "add_scalar", "add_scalars", "write", "debug", "set_postfix", "log_metric"),
        # Of tqdm's bar, beside set_postfix: StyleSDF and GANgealing show their losses by it.
        *("log_metrics", "set_description"),
    }
)
"""Last names of functions that show a number."""
DEEPEST = 6
"""Assignments that are followed back: further ones were never needed, and cycles end."""


def number_kind(
    modules: Sequence[Module], module: Module, around: ast.AST, node: ast.expr, line: int, depth: int = 0
) -> NumberKind:
    """Return what kind of number an expression is, in a function, before a line."""
    if depth > DEEPEST:
        return "unknown"
    if isinstance(node, (ast.Name, ast.Attribute)):
        return _of_variable(modules, module, around, node, line, depth)
    if isinstance(node, ast.BinOp):
        left = number_kind(modules, module, around, node.left, line, depth + 1)
        right = number_kind(modules, module, around, node.right, line, depth + 1)
        if isinstance(node.op, ast.Div):
            return "mean" if (left, right) == ("sum", "sum") else "unknown"
        return left if right in (left, "unknown") else right if left == "unknown" else "unknown"
    if not isinstance(node, ast.Call):
        return "unknown"
    name = last_name(node.func)
    if isinstance(node.func, ast.Attribute) and name in _AS_IT_IS:
        return number_kind(modules, module, around, node.func.value, line, depth + 1)
    if name in _MADE_OF and node.args:
        given = node.args[-1]
        parts = given.elts if isinstance(given, (ast.List, ast.Tuple)) else [given]
        kinds = {number_kind(modules, module, around, part, line, depth + 1) for part in parts}
        return kinds.pop() if len(kinds) == 1 else "unknown"
    if name in _SUMS:
        return "sum"
    if name in _MEANS:
        return "mean"
    return "mean" if _is_mean_loss(modules, module, node) else "unknown"


def _of_variable(
    modules: Sequence[Module], module: Module, around: ast.AST, node: ast.expr, line: int, depth: int
) -> NumberKind:
    text = ast.unparse(node)
    added = (one for one in module.index.within(around, ast.AugAssign) if one.lineno < line)
    if any(ast.unparse(one.target) == text and isinstance(one.op, ast.Add) for one in added):
        return "sum"
    assigned = [pair for one in module.index.within(around, ast.Assign) for pair in _pairs(one) if one.lineno <= line]
    values = [value for target, value in assigned if ast.unparse(target) == text]
    if values:
        return number_kind(modules, module, around, values[-1], values[-1].lineno - 1, depth + 1)
    if isinstance(around, ast.FunctionDef):
        kinds = {
            number_kind(modules, caller, caller.body_around(call), given, call.lineno, depth + 1)
            for caller, call, given in _given(modules, around, text)
        }
        return kinds.pop() if len(kinds) == 1 else "unknown"
    return "unknown"


def _pairs(statement: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the targets of an assignment with their values, those of ``a, b = one, other`` each with its own."""
    for target in statement.targets:
        several = isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple)
        if several and len(target.elts) == len(statement.value.elts):  # type: ignore[attr-defined]
            yield from zip(target.elts, statement.value.elts, strict=True)  # type: ignore[attr-defined]
        else:
            yield target, statement.value


_Given = tuple[Module, ast.Call, ast.expr]


def _given(modules: Sequence[Module], function: ast.FunctionDef, name: str) -> Iterator[_Given]:
    """Yield what the calls of a function give for a parameter."""
    names = [one.arg for one in function.args.args]
    if name not in names:
        return
    position = names.index(name) - (names[0] == "self")
    for module in modules:
        for call in module.calls_by_name.get(function.name, ()):
            given = next((entry.value for entry in call.keywords if entry.arg == name), None)
            if given is None and position < len(call.args):
                given = call.args[position]
            if given is not None:
                yield module, call, given


def _is_mean_loss(modules: Sequence[Module], module: Module, call: ast.Call) -> bool:
    """Return whether a call is a loss of torch that takes the mean: of torch.nn.functional, or of an object."""
    full = module.resolve(call.func)
    if full.startswith("torch.nn.functional."):
        return _is_loss(full, "torch.nn.functional.") and not _other_reduction(call)
    name = last_name(call.func)
    made = [
        (one, value)
        for one in modules
        for statement in one.index.of(ast.Assign)
        if any(last_name(target) == name for target in statement.targets)
        for value in _calls_in(statement.value)
    ]
    own = [(one, value) for one, value in made if one is module]  # Other modules may use the name for another loss.
    made = own or made
    losses = [value for one, value in made if _is_loss(one.resolve(value.func), "torch.nn.")]
    return bool(losses) and not any(map(_other_reduction, losses))


def _calls_in(value: ast.expr) -> Iterator[ast.Call]:
    """Yield a call, and what its result is made of by methods: ``nn.CrossEntropyLoss().cuda()``."""
    while isinstance(value, ast.Call):
        yield value
        value = value.func.value if isinstance(value.func, ast.Attribute) else value.func


def _is_loss(full: str, place: str) -> bool:
    return full.startswith(place) and any(word in full.rpartition(".")[2].lower() for word in _LOSSES)


def _other_reduction(call: ast.Call) -> bool:
    return any(
        entry.arg in ("reduction", "reduce", "size_average")
        and not (isinstance(entry.value, ast.Constant) and entry.value.value in ("mean", True))
        for entry in call.keywords
    )


def followers(nodes: Sequence[ast.AST], name: str) -> set[str]:
    """Return a variable, those that are assigned from it, and the meters that it alone is handed to."""
    names = {name}
    assignments = [node for node in nodes if isinstance(node, ast.Assign)]
    for _ in range(3):
        known = len(names)
        names.update(meter for node in nodes if (meter := _meter_of(node, names)))
        for node in assignments:
            if mentions(node.value, names):
                targets = [target for target in node.targets if isinstance(target, (ast.Name, ast.Attribute))]
                names.update(ast.unparse(target) for target in targets)
        if len(names) == known:
            break
    return names


def _meter_of(node: ast.AST, names: set[str]) -> str:
    """Return the meter of ``meter.update(loss.item())``; one that gets a number of samples, too, may divide by it."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "update":
        return ""
    if len(node.args) != 1 or node.keywords or not is_number_of(node.args[0], names):
        return ""
    return ast.unparse(node.func.value)


def is_number_of(node: ast.expr, names: Set[str]) -> bool:
    """Return whether an expression is one of some variables, or its number."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _AS_IT_IS:
        node = node.func.value
    return isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) in names
