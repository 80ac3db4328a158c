"""The fix of a checkpoint that is loaded onto the GPU from which it was saved."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.finding import Finding
from ddpdoctor.fix.edits import Fix, with_keyword
from ddpdoctor.source.script.module import Module, Scope
from ddpdoctor.source.script.script import Script


def load_to_cpu(script: Script, finding: Finding) -> Iterator[Fix]:
    """Give the load ``map_location="cpu"``.

    It is safe where all that is loaded goes into ``load_state_dict``, which copies it to where it belongs, or is looked
    up by a key; tensors that are used as they are would be on another device than before.
    """
    for module in script.modules:
        if finding.location is None or str(module.path) != finding.location.file:
            continue
        for node in module.nodes:
            if isinstance(node, ast.Call) and module.location(node) == finding.location:
                edit = with_keyword(module, node, "map_location", '"cpu"')
                if edit is not None:
                    yield Fix(
                        code=finding.code,
                        description='load with map_location="cpu"',
                        location=finding.location,
                        edits=(edit,),
                        safe=_goes_into_state(module, node),
                    )
                return


def _goes_into_state(module: Module, node: ast.expr) -> bool:
    around = module.parents.get(node)
    if isinstance(around, ast.Assign) and len(around.targets) == 1 and isinstance(around.targets[0], ast.Name):
        return _is_only_looked_into(module, around, around.targets[0].id)
    while isinstance(around, (ast.Subscript, ast.Attribute)):
        around = module.parents.get(around)
    return _is_load(around)


def _is_only_looked_into(module: Module, assignment: ast.Assign, name: str) -> bool:
    scope = next((inner for inner in module.ancestors(assignment) if isinstance(inner, Scope)), module.tree)
    uses = [
        node
        for node in ast.walk(scope)
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
    ]
    into_state = [use for use in uses if _reaches_load(module, use)]
    by_key = [use for use in uses if isinstance(module.parents.get(use), (ast.Subscript, ast.Compare))]
    return bool(into_state) and set(uses) == {*into_state, *by_key}


def _reaches_load(module: Module, use: ast.AST) -> bool:
    return any(_is_load(around) for around in module.ancestors(use))


def _is_load(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load_state_dict"
