"""The fix of a function about ranks that is tested instead of called."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.finding import Finding, Location
from ddpdoctor.fix.edits import Fix, after
from ddpdoctor.source.script.call_graph import mentions_of
from ddpdoctor.source.script.module import Module
from ddpdoctor.source.script.script import Script
from ddpdoctor.source.vocabulary import COLLECTIVES

_COLLECTIVE_NAMES = frozenset(name.rpartition(".")[2] for name in COLLECTIVES if ".checkpoint." not in name) | {
    "backward"
}


def call_guard(script: Script, finding: Finding) -> Iterator[Fix]:
    """Call the function.

    It is not safe where the function wants arguments, or where what now runs on every rank may contain a collective:
    called on one rank only, that would hang.
    """
    for module in script.modules:
        if finding.location is None or str(module.path) != finding.location.file:
            continue
        guard = _expression_at(module, finding.location)
        if guard is None:
            return
        name = module.excerpt(guard)
        yield Fix(
            code=finding.code,
            description=f"call {name}()",
            location=finding.location,
            edits=(after(module, guard, "()"),),
            safe=_needs_nothing(script, module, guard, finding) and not _holds_collectives(script, module, guard),
        )
        return


def _expression_at(module: Module, place: Location) -> ast.expr | None:
    for node in module.nodes:
        if isinstance(node, (ast.Name, ast.Attribute)) and node.lineno == place.line and module.location(node) == place:
            return node
    return None


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
        if str(module.path) != place.file:
            continue
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef) and node.lineno == place.line:
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
            if isinstance(node, ast.Call):
                function = node.func
                name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
                if name in leading:
                    return True
    return False
