"""Names of flags that are true in a job with ranks: the group is made, or the model wrapped, where they hold."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from ddpdoctor.source.script.module import Module
from ddpdoctor.source.script.syntax_index import descend, last_name
from ddpdoctor.source.vocabulary import DDP, LOCAL_RANK_NAMES, RANK_NAMES

_JOINS = frozenset({"torch.distributed.init_process_group", DDP})


def mode_flags(modules: Sequence[Module]) -> frozenset[str]:
    """Return the names and attributes that alone stand in the tests around what joins or wraps, in all modules."""
    return frozenset(name for module in modules for name in _flags(module)) - RANK_NAMES - LOCAL_RANK_NAMES


def _flags(module: Module) -> Iterator[str]:
    for call, full in module.calls():
        if full not in _JOINS:
            continue
        inner: ast.AST = call
        for around in module.ancestors(call):
            if isinstance(around, (ast.FunctionDef, ast.AsyncFunctionDef)):
                break
            plain = isinstance(around, ast.If) and isinstance(around.test, (ast.Name, ast.Attribute))
            if plain and inner in around.body and not _sets(around.body, around.test):  # type: ignore[attr-defined]
                yield last_name(around.test)  # type: ignore[attr-defined]
            inner = around


def _sets(body: Sequence[ast.stmt], test: ast.expr) -> bool:
    """Return whether the arm itself sets what was tested, as a count of tries."""
    text = ast.unparse(test)
    assigned = (node for part in body for node in descend(part) if isinstance(node, ast.Assign))
    return any(ast.unparse(target) == text for node in assigned for target in node.targets)
