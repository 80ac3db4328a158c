"""Quotients by counts of a rank's own samples that are averaged over the ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.check import Verdict
from ddpdoctor.checks.collectives.sum_as_mean import argument_name
from ddpdoctor.checks.gradients.unlike_one_process import Followed, Part, divisors
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import ALL_RANKS, NONE
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.divergence import function_around, nodes_of
from ddpdoctor.source.ranks.ranks import size_names
from ddpdoctor.source.script.module import argument_of, descend, last_name

_REDUCTIONS = frozenset({"all_reduce", "reduce"})
# Methods that count where something holds, which is another number for the samples of each rank.
_COUNTS_WHERE = frozenset({"sum", "count_nonzero"})


def averaged_ratios(projection: Projection) -> Iterator[Verdict]:
    """Yield the divisions by a count of what the rank's own samples hold, where the quotients are averaged."""
    events = [event for event in projection.in_course("collective") if event.name in _REDUCTIONS]
    sizes = size_names(projection.machine.store)
    seen: set[ast.AST] = set()
    for event in events:
        given = argument_of(event.node, "tensor", 0)
        if event.ranks != ALL_RANKS or given is None or event.node in seen or not _is_averaged(event, sizes):
            continue
        seen.add(event.node)
        followed = Followed(projection, events)
        start = Part(event.module, function_around(event.module, event.node), given)
        for part in followed.along(start):
            for divisor in divisors(part.node):
                inside = Part(part.module, part.function, divisor)
                if part.node in seen or not any(map(_counts_where, followed.all(inside))):
                    continue
                if followed.reduction(inside) is not None:
                    continue  # Of all ranks.
                seen.add(part.node)
                count = part.module.excerpt(divisor, 40)
                yield Verdict(
                    sentence=f"each rank divides by `{count}`, a count of what its own samples hold, and the quotients "
                    "are averaged: a rank with a few counts as much as one with many",
                    locations=(part.module.location(part.node), event.location),
                    because=("the quotients of all ranks are averaged here", event),
                )


def _is_averaged(event: Event, sizes: frozenset[str]) -> bool:
    """Return whether a reduction takes the mean, or its sum is divided by the number of ranks."""
    operation = str(getattr(event.argument("op", 1) or NONE, "name", ""))
    if operation and not operation.endswith((".SUM", ".AVG")):
        return False
    if operation.endswith(".AVG"):
        return True
    name = argument_name(event)
    for node in nodes_of(function_around(event.module, event.node)) if name else ():
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            whole, number = node.left, node.right
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
            whole, number = node.target, node.value
        elif isinstance(node, ast.Call) and last_name(node.func) in ("div", "div_") and node.args:
            whole, number = node.func, node.args[0]
        else:
            continue
        named = any(isinstance(one, ast.expr) and ast.unparse(one) == name for one in descend(whole))
        if named and any(last_name(one) in sizes for one in descend(number)):
            return True
    return False


def _counts_where(part: Part) -> bool:
    """Return whether an expression counts where a condition holds: ``(labels != ignored).sum()``, of a mask, too."""
    node = part.node
    if not isinstance(node, ast.Call) or last_name(node.func) not in _COUNTS_WHERE:
        return False
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    inside = [*node.args, *([owner] if owner is not None else [])]
    return any(_is_condition(part, one) for one in inside)


def _is_condition(part: Part, node: ast.expr) -> bool:
    while isinstance(node, (ast.BinOp, ast.UnaryOp)):
        node = node.left if isinstance(node, ast.BinOp) else node.operand
    if isinstance(node, ast.Compare):
        return True
    if not isinstance(node, ast.Name):
        return False
    assigned = (one for one in part.module.index.within(part.function, ast.Assign) if len(one.targets) == 1)
    values = (one.value for one in assigned if isinstance(one.targets[0], ast.Name) and one.targets[0].id == node.id)
    return any(isinstance(one, ast.Compare) for value in values for one in descend(value))
