"""A condition tests a rank function instead of calling it.

What it finds
    The name of a function such as is_main_process, dist.is_initialized or get_rank in a condition, without the
    parentheses that would call it. The function is one of the project, one of torch.distributed, or one that the same
    project calls elsewhere.

Why it is bad
    A function is always true, and never equal to 0. `if is_main_process:` selects every rank, so all of them save,
    print and log; `if get_rank == 0:` selects none, so nothing is ever saved. Python does not warn.

Example
    if is_main_process:
        torch.save(model.state_dict(), "checkpoint.pt")

Remedy
    Call it: `if is_main_process():`.

When it is wrong
    If the test intentionally checks whether a hook was set. Names that are assigned anywhere else in the module are
    excluded for that reason.

References
    https://docs.python.org/3/library/stdtypes.html#truth-value-testing
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.check import Check, Script
from ddpdoctor.finding import Finding, Location, Severity
from ddpdoctor.fix import Fix, after, fix_of, node_at
from ddpdoctor.source.script.call_graph import mentions_of
from ddpdoctor.source.script.module import Module, all_once, descend, last_name, once
from ddpdoctor.source.vocabulary import COLLECTIVES, is_first_rank_name

CHECK = Check(
    code="DDP516",
    name="uncalled-rank-guard",
    severity={"source": Severity.ERROR},
    triggers=("rank", "RANK", "is_", "main", "master", "primary", "distributed"),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report names of functions about ranks that are tested without being called."""
    for module in script.modules:
        for node, compared in _tested(module):
            definition = _function(script, module, node)
            if definition is None:
                continue
            text, last = module.excerpt(node), last_name(node)
            outcome = "never equal to a number" if compared else "always true"
            known = definition is not _NO_LOCATION
            yield CHECK.finding(
                f"{text} is a function that is not called here, so the condition is {outcome}",
                remedy=f"Call it: {text}().",
                locations=module.location(node),
                because=(("the function is defined here", definition),) if known else (),
                severity=Severity.ADVICE if last in _OF_THE_MACHINE else None,
            )


# The fix of a function about ranks that is tested instead of called.

_COLLECTIVE_NAMES = frozenset(name.rpartition(".")[2] for name in COLLECTIVES if ".checkpoint." not in name) | {
    "backward"
}


def fixes(script: Script, finding: Finding) -> Iterator[Fix]:
    """Call the function.

    It is not safe where the function wants arguments, or where what now runs on every rank may contain a collective:
    called on one rank only, that would hang.
    """
    named, owned = node_at(script, finding, ast.Name), node_at(script, finding, ast.Attribute)
    for module, guard in filter(None, (named, owned)):
        safe = _needs_nothing(script, module, guard, finding) and not _holds_collectives(script, module, guard)
        yield from fix_of(finding, f"call {module.excerpt(guard)}()", after(module, guard, "()"), safe=safe)


def _needs_nothing(script: Script, module: Module, guard: ast.expr, finding: Finding) -> bool:
    """Return whether the function can be called without arguments, by its definition or by how others call it."""
    for fact in finding.evidence:
        if fact.location is not None and fact.location != finding.location:
            return _takes_nothing(script, fact.location, method=isinstance(guard, ast.Attribute))
    full = module.resolve(guard)
    if full.startswith(("torch.distributed.", "torch.cuda.")):
        return True
    calls = [call for other in script.modules for call, name in other.calls() if name == full]
    return any(not call.args and not call.keywords for call in calls)


def _takes_nothing(script: Script, place: Location, *, method: bool) -> bool:
    for module in script.modules:
        for node in module.index.of(ast.FunctionDef) if str(module.path) == place.file else ():
            if node.lineno == place.line:
                arguments = node.args
                needed = len(arguments.posonlyargs) + len(arguments.args) - len(arguments.defaults)
                bound = method and isinstance(module.parents.get(node), ast.ClassDef)
                return needed <= bound and all(arguments.kw_defaults)
    return False


def _holds_collectives(script: Script, module: Module, guard: ast.expr) -> bool:
    statement = next((node for node in module.ancestors(guard) if isinstance(node, ast.stmt)), None)
    if not isinstance(statement, (ast.If, ast.While)):
        return True
    if any(isinstance(node, (ast.Return, ast.Break, ast.Continue, ast.Raise)) for node in ast.walk(statement)):
        return True
    leading = mentions_of(script.modules).synchronising | _COLLECTIVE_NAMES
    for part in (*statement.body, *statement.orelse):
        for node in ast.walk(part):
            if isinstance(node, ast.Call) and last_name(node.func) in leading:
                return True
    return False


# Conditions that test a function instead of what it returns.

_EXTERNAL = frozenset(
    f"torch.distributed.{name}"
    for name in ("is_initialized", "is_available", "get_rank", "get_world_size", "is_torchelastic_launched")
) | {"torch.cuda.is_available"}
# They answer the same on every rank, so an uncalled one separates no ranks.
_OF_THE_MACHINE = frozenset({"is_available", "is_initialized", "is_torchelastic_launched"})
_PREFIXES = ("is_", "_is_", "am_", "should_", "on_", "get_rank", "get_local_rank", "get_world_size", "get_global_rank")
_RANK_WORDS = frozenset(
    {"get_rank", "RANK", "LOCAL_RANK", "rank", "local_rank", "get_world_size", "is_initialized", "world_size"}
)
_CONDITIONS = frozenset({ast.If, ast.While, ast.IfExp, ast.Assert, ast.UnaryOp, ast.BoolOp, ast.Compare})
# Decorators under which a call still means the function: any other may make a property of it.
_TRANSPARENT = frozenset({"lru_cache", "cache", "staticmethod", "classmethod"})
_NO_LOCATION = Location(file="", line=0)


@all_once
def _tested(module: Module) -> Iterator[tuple[ast.Name | ast.Attribute, bool]]:
    """Names and attributes in conditions that may be functions about ranks; whether each is compared with a number."""
    for place in module.index.places(*_CONDITIONS):
        yield from _operands(module, module.nodes[place])


def _operands(module: Module, node: ast.AST) -> Iterator[tuple[ast.Name | ast.Attribute, bool]]:
    operands: list[ast.expr] = []
    if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
        operands = _parts(node.test)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        operands = _parts(node.operand)
    elif isinstance(node, ast.BoolOp):
        operands = node.values[:-1]
    elif isinstance(node, ast.Compare) and _is_number(node.comparators[0]):
        operands = [node.left]
    for operand in operands:
        if isinstance(operand, (ast.Name, ast.Attribute)):
            name = last_name(operand)
            if name.startswith(_PREFIXES) or is_first_rank_name(name) or name in _functions(module):
                yield operand, isinstance(node, ast.Compare)


@once
def _functions(module: Module) -> frozenset[str]:
    """Return the names of a module's own functions and methods, and of what it imports by name."""
    own = {function.name for function in module.index.of(ast.FunctionDef)}
    return frozenset(own | {entry.bound_as for entry in module.imports if entry.name})


def _parts(condition: ast.expr) -> list[ast.expr]:
    """Return a condition, or the last operand of an ``and`` or ``or``; the others are seen at that operator."""
    return [condition.values[-1]] if isinstance(condition, ast.BoolOp) else [condition]


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int


def _function(script: Script, module: Module, node: ast.Name | ast.Attribute) -> Location | None:
    """Return where the function is defined that a name certainly means; ``_NO_LOCATION`` outside of the project."""
    last = last_name(node)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return _method(module, node)
    if isinstance(node, ast.Name):
        if _is_rebound(module, last):
            return None
        definitions = [inner for inner in module.tree.body if _defines(inner, last)]
        if definitions:
            return _if_about_ranks(module, definitions[-1])
    full = module.resolve(node)
    if full in _EXTERNAL:
        return _NO_LOCATION
    owner, _, name = full.rpartition(".")
    other = script.module(owner) if owner else None
    if other is not None:
        found = [inner for inner in other.tree.body if _defines(inner, name)]
        return _if_about_ranks(other, found[-1]) if found and not _is_rebound(other, name) else None
    if full and is_first_rank_name(last) and any(full == name for one in script.modules for _, name in one.calls()):
        return _NO_LOCATION
    return None


def _defines(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == name


def _if_about_ranks(module: Module, definition: ast.AST) -> Location | None:
    if not isinstance(definition, ast.FunctionDef) or not _is_plain(definition):
        return None
    of_ranks = any(_word(inner) in _RANK_WORDS for inner in descend(definition))
    if of_ranks or is_first_rank_name(definition.name) or _is_predicate(definition):
        return module.head_location(definition)
    return None


def _is_predicate(definition: ast.FunctionDef) -> bool:
    """Return whether a function does nothing but compare what it knows by itself with a number."""
    last = definition.body[-1]
    compared = last.value if isinstance(last, ast.Return) else None
    known = len(definition.args.args) <= 1 and isinstance(compared, ast.Compare) and len(definition.body) <= 2
    return known and isinstance(compared, ast.Compare) and _is_number(compared.comparators[0])


def _word(node: ast.AST) -> object:
    return node.value if isinstance(node, ast.Constant) else last_name(node)


def _is_plain(definition: ast.FunctionDef) -> bool:
    """Return whether no decorator may turn the function into a property or a value."""
    names = {
        ast.unparse(entry.func if isinstance(entry, ast.Call) else entry).rpartition(".")[2]
        for entry in definition.decorator_list
    }
    return names <= _TRANSPARENT


def _method(module: Module, node: ast.Attribute) -> Location | None:
    for cls, method in _methods(module):
        if method.name == node.attr and cls.lineno <= node.lineno <= (cls.end_lineno or cls.lineno):
            return None if _is_stored(cls, node.attr) else _if_about_ranks(module, method)
    return None


@all_once
def _methods(module: Module) -> Iterator[tuple[ast.ClassDef, ast.FunctionDef]]:
    """Methods that no decorator turns into a value, with their classes."""
    for cls in module.index.of(ast.ClassDef):
        yield from ((cls, one) for one in cls.body if isinstance(one, ast.FunctionDef) and _is_plain(one))


def _is_stored(cls: ast.ClassDef, name: str) -> bool:
    return any(
        isinstance(inner, ast.Attribute) and inner.attr == name and isinstance(inner.ctx, ast.Store)
        for inner in ast.walk(cls)
    )


def _is_rebound(module: Module, name: str) -> bool:
    """Return whether a name is also assigned or a parameter somewhere in a module, and may hold something else."""
    return name in _rebound(module)


@once
def _rebound(module: Module) -> frozenset[str]:
    top = frozenset(map(id, module.tree.body))
    assigned = {name.id for name in module.index.of(ast.Name) if name.ctx.__class__ is not ast.Load}
    taken = {argument.arg for argument in module.index.of(ast.arg)}
    inner = {function.name for function in module.index.of(ast.FunctionDef) if id(function) not in top}
    return frozenset(assigned | taken | inner)
