"""The result of a collective is discarded.

What it finds
    A collective that returns its result (Horovod's `allreduce`, functional collectives, those of
    `torch.distributed.nn`, Accelerate's `gather` and `reduce`) called as a statement on a variable that is used
    afterwards as if it had been changed in place.

Why it is bad
    The variable still holds this rank's own value. Nothing fails: gradients are not averaged, or rank 0's metric is
    reported as the job's.

Example
    hvd.allreduce(loss)                 # returns the average; loss stays local
    print(loss.item())

Remedy
    Assign the result (loss = hvd.allreduce(loss)), or call the in-place form (hvd.allreduce_, dist.all_reduce).

When it is wrong
    If the call only serves to synchronise the ranks.

References
    https://horovod.readthedocs.io/en/stable/api.html#module-horovod.torch
    https://docs.pytorch.org/docs/stable/distributed.html
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.check import Check
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.projection import project
from ddpdoctor.source.queries.divergence import function_around, nodes_of
from ddpdoctor.source.script.module import Module
from ddpdoctor.source.script.script import Script

CHECK = Check(
    code="DDP315",
    name="discarded-collective-result",
    severity={"source": Severity.ERROR},
    subjects=("collectives",),
    triggers=("reduce", "gather", "broadcast", "scatter", "to_all", "toall", "pad_across"),
)


# Collectives that return their result and whose result no one takes.

_HOROVOD = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "grouped_allreduce")
_FUNCTIONAL = (
    "all_reduce",
    "all_gather",
    "all_gather_tensor",
    "broadcast",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "gather",
    "scatter",
)
RETURNING = frozenset(
    {
        *(f"horovod.torch.{name}" for name in _HOROVOD),
        *(f"torch.distributed._functional_collectives.{name}" for name in _FUNCTIONAL),
        *(f"torch.distributed.nn.{name}" for name in _FUNCTIONAL),
        *(f"torch.distributed.nn.functional.{name}" for name in _FUNCTIONAL),
    }
)
"""Full names of collectives that leave their argument as it was."""
_RETURNING_NAMES = frozenset((*_HOROVOD, *_FUNCTIONAL))
# Methods of an Accelerator: all of them return what they made and leave the argument.
_OF_ACCELERATE = frozenset({"gather", "gather_for_metrics", "reduce", "pad_across_processes"})


def in_source(script: Script) -> Iterator[Finding]:
    """Report collectives whose result no one takes."""
    projection = project(script)
    for module in projection.machine.script.modules:
        others = [name for name, full in module.aliases.items() if full in RETURNING]
        for last in _RETURNING_NAMES.union(others).intersection(module.calls_by_name):
            for call in module.calls_by_name[last]:
                name = module.resolve(call.func)
                if name in RETURNING:
                    yield from _judged(module, call, name.rpartition(".")[2])
    seen: set[ast.AST] = set()
    for event in projection.of_kind("collective"):
        if event.name in _OF_ACCELERATE and isinstance(event.node, ast.Call) and event.node not in seen:
            seen.add(event.node)
            if isinstance(event.node.func, ast.Attribute) and not event.module.resolve(event.node.func):
                yield from _judged(event.module, event.node, event.name)


def _judged(module: Module, call: ast.Call, collective: str) -> Iterator[Finding]:
    statement = module.parents.get(call)
    if not isinstance(statement, ast.Expr) or not call.args or not isinstance(call.args[0], (ast.Name, ast.Attribute)):
        return
    name = ast.unparse(call.args[0])
    last = statement.end_lineno or statement.lineno
    uses = [
        node
        for node in nodes_of(function_around(module, call))
        if isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) == name and node.lineno > last
    ]
    first = min(uses, key=lambda node: (node.lineno, node.col_offset), default=None)
    if first is not None and isinstance(first.ctx, ast.Load):
        yield CHECK.finding(
            f"{collective} returns its result and leaves `{name}` unchanged; the result is discarded",
            remedy=f"Assign it: {name} = {module.excerpt(call)}.",
            locations=module.location(call),
            because=(f"`{name}` is used here, with this rank's own value", module.location(first)),
        )
