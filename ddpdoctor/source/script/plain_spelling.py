"""Other spellings of the same thing, put plainly, so that whatever reads a tree needs to know one of them.

``getattr(model, "module")`` is ``model.module``, ``setattr(args, "rank", 0)`` as a statement is an assignment, and an
f-string without a placeholder is a string.
"""

from __future__ import annotations

import ast

from ddpdoctor.source.script.syntax_index import children_of


def in_plain_spelling(tree: ast.Module) -> None:
    """Put the expressions and statements of a tree in their plain spelling, in place; all keep their locations."""
    waiting: list[ast.AST] = [tree]
    for node in waiting:
        for name, field in ast.iter_fields(node):
            if field.__class__ is list:
                for place, child in enumerate(field):
                    if (plain := _plain(child)) is not None:
                        field[place] = plain
            elif field.__class__ in _SPELT and (plain := _plain(field)) is not None:
                setattr(node, name, plain)
        waiting += children_of(node)


def _plain(node: object) -> ast.AST | None:
    """Return the plain spelling of a node; None where it has no other."""
    if isinstance(node, ast.JoinedStr):
        texts = [str(part.value) for part in node.values if isinstance(part, ast.Constant)]
        return ast.copy_location(ast.Constant("".join(texts)), node) if len(texts) == len(node.values) else None
    if isinstance(node, ast.Call):
        name = _attribute_named(node, "getattr", 2)
        return ast.copy_location(ast.Attribute(node.args[0], name, ast.Load()), node) if name else None
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        name = _attribute_named(node.value, "setattr", 3)
        if name:
            owner, _, value = node.value.args
            target = ast.copy_location(ast.Attribute(owner, name, ast.Store()), node.value)
            return ast.copy_location(ast.Assign([target], value), node)
    return None


def _attribute_named(call: ast.Call, function: str, arguments: int) -> str:
    """Return the attribute that ``getattr`` or ``setattr`` is given as a constant; empty for any other call."""
    if not isinstance(call.func, ast.Name) or call.func.id != function or call.keywords:
        return ""
    name = call.args[1] if len(call.args) == arguments else None
    text = name.value if isinstance(name, ast.Constant) else None
    return text if isinstance(text, str) and text.isidentifier() else ""


_SPELT = frozenset({ast.Call, ast.JoinedStr})
