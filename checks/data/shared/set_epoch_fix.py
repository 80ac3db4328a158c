"""The fix of a sampler that is never told the epoch."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.checks.data.shared.epochs_source import ForgottenEpoch
from ddpdoctor.finding import Finding
from ddpdoctor.fix.edits import Edit, Fix, first_in_body
from ddpdoctor.source.events import LoopAround
from ddpdoctor.source.script.module import Module, Scope

_COUNTING = frozenset({"range", "trange"})
_WRAPPING = frozenset({"tqdm", "track"})


def set_epoch_fix(forgotten: ForgottenEpoch, finding: Finding) -> Iterator[Fix]:
    """Call ``set_epoch`` first thing in the loop of epochs.

    Nothing is offered unless the loop counts with one name, and the sampler has one name, is bound to it once, and is
    certainly bound before the loop.
    """
    module, loop = forgotten.epochs.module, forgotten.epochs.node
    if forgotten.sampler.module is not module or not isinstance(loop, ast.For) or finding.location is None:
        return
    epoch, sampler = counter_of(loop), name_bound_before(module, forgotten.sampler.node, loop)
    if not epoch or not sampler:
        return
    edit = first_in_body(module, loop.body, f"{sampler}.set_epoch({epoch})")
    if edit is not None:
        yield Fix(
            code=finding.code,
            description=f"call {sampler}.set_epoch({epoch}) at the start of each epoch",
            location=finding.location,
            edits=(edit,),
            safe=True,
        )


def set_epoch_through(module: Module, loader: ast.AST, around: LoopAround, attribute: str) -> Edit | None:
    """Return the call of ``set_epoch`` on the sampler of a loader with a name; None as ``set_epoch_fix``."""
    loop = around.node
    if around.module is not module or not isinstance(loop, ast.For):
        return None
    epoch, name = counter_of(loop), name_bound_before(module, loader, loop)
    return first_in_body(module, loop.body, f"{name}.{attribute}.set_epoch({epoch})") if epoch and name else None


def counter_of(loop: ast.For) -> str:
    """Return the name that counts the epochs; empty when the loop does not count, or counts in another variable."""
    iterable: ast.expr = loop.iter
    while isinstance(iterable, ast.Call) and _last_name(iterable.func) in _WRAPPING and iterable.args:
        iterable = iterable.args[0]
    if isinstance(iterable, ast.Call) and _last_name(iterable.func) in _COUNTING and isinstance(loop.target, ast.Name):
        return loop.target.id
    return ""


def name_bound_before(module: Module, node: ast.AST, loop: ast.For) -> str:
    """Return the name that an object is bound to, once, before a loop and in its block or one around it; or empty."""
    statement = module.parents.get(node)
    if not isinstance(statement, ast.Assign) or statement.value is not node or len(statement.targets) != 1:
        return ""
    target = statement.targets[0]
    if not isinstance(target, ast.Name) or not _precedes(module, statement, loop):
        return ""
    scope = _scope(module, loop)
    if _scope(module, statement) is not scope:
        return ""
    bindings = [
        name
        for name in ast.walk(scope)
        if isinstance(name, ast.Name) and name.id == target.id and not isinstance(name.ctx, ast.Load)
    ]
    return target.id if len(bindings) == 1 else ""


def _precedes(module: Module, statement: ast.stmt, loop: ast.For) -> bool:
    """Return whether the statement stands in the same list of statements as the loop or something around it, and
    above.
    """
    around = {loop, *module.ancestors(loop)}
    parent = module.parents.get(statement)
    for name in ("body", "orelse", "finalbody"):
        block = getattr(parent, name, None)
        if isinstance(block, list) and statement in block:
            return any(later in around for later in block[block.index(statement) + 1 :])
    return False


def _scope(module: Module, node: ast.AST) -> ast.AST:
    return next((around for around in module.ancestors(node) if isinstance(around, Scope)), module.tree)


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
