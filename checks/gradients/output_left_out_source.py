"""Outputs of a wrapped model that enter the loss only where something holds of the rank's own batch."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.check import Verdict
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.attributes import class_attribute
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import ALL_RANKS, Function, Instance, tags_of
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.parameters import demands_all, has_parameters, modules_of
from ddpdoctor.source.queries.wrapped_models import ddp_objects
from ddpdoctor.source.script.module import descend, made_from

_OF_BATCH = frozenset({"batch", "extent"})
"""Kinds of the origins of what a condition asks that each rank's batch decides."""


def outputs_left_out(projection: Projection) -> Iterator[Verdict]:
    """Yield the conditions under which alone an output is used that one head of the model makes and no other does."""
    seen: set[ast.AST] = set()
    for forward, wrap, name, head, test in _left_out(projection):
        if test in seen or not demands_all(wrap):
            continue
        seen.add(test)
        yield Verdict(
            sentence=f"`{name}`, which {head} makes, enters the loss only where `{forward.module.excerpt(test, 60)}` "
            f"holds of the rank's batch: in other steps {head} gets no gradient, and DDP waits for it",
            remedy=f"Let {head} take part in each step: add `0.0 * {name}.sum()` to the loss where the term is left "
            "out; or pass find_unused_parameters=True.",
            locations=forward.module.location(test),
            because=(("the model gives it here", forward), ("DDP is told of no unused parameters", wrap)),
        )


def wraps_with_outputs_left_out(projection: Projection) -> set[int]:
    """Return the numbers of the DDP objects of which an output is used for some batches only."""
    return {wrap.ordinal for _, wrap, *_ in _left_out(projection)}


def _left_out(projection: Projection) -> Iterator[tuple[Event, Event, str, str, ast.expr]]:
    machine = projection.machine
    wraps = {one.ordinal: one for one in projection.in_course("wrap")}
    for forward in projection.in_course("ddp-forward"):
        numbers = ddp_objects(forward.receiver) & wraps.keys()
        if not forward.gradients or forward.ranks != ALL_RANKS or len(numbers) != 1:
            continue
        wrap = wraps[next(iter(numbers))]
        model = next(modules_of(machine, wrap), None)
        for name, head in _taken_apart(machine, forward, model) if model is not None else ():
            test = _only_under(machine, forward, name)
            if test is not None:
                yield forward, wrap, name, head, test


def _taken_apart(machine: Machine, forward: Event, model: Instance) -> Iterator[tuple[str, str]]:
    """Yield the variables that the outputs of a forward are assigned to, with the head that makes one alone."""
    around = forward.module.parents.get(forward.node)
    target = around.targets[0] if isinstance(around, ast.Assign) and around.value is forward.node else None
    names = target.elts if isinstance(target, (ast.Tuple, ast.List)) else ()
    method = class_attribute(machine, model.cls, "forward")
    if not names or not isinstance(method, Function):
        return
    returns = [node.value for node in descend(method.node) if isinstance(node, ast.Return)]
    outputs = returns[0].elts if len(returns) == 1 and isinstance(returns[0], ast.Tuple) else []
    if len(outputs) != len(names):
        return
    heads = [_heads(machine, method.node, model, output) for output in outputs]
    for number, name in enumerate(names):
        others = {head for other, given in enumerate(heads) if other != number for head in given}
        own = sorted(heads[number] - others)
        if own and isinstance(name, ast.Name):
            yield name.id, own[0]


def _heads(machine: Machine, body: ast.AST, model: Instance, output: ast.expr) -> set[str]:
    """Return the parts with parameters that an output is made by, each called in the forward at one place."""
    called = [node.func for node in descend(body) if isinstance(node, ast.Call)]
    texts = [ast.unparse(function) for function in called]
    found = set()
    for node in made_from(output, body):
        text = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        part = machine.store.get(model.number, text.removeprefix("self.")) if text.startswith("self.") else None
        if part is not None and texts.count(text) == 1 and has_parameters(machine, part):
            found.add(text)
    return found


def _only_under(machine: Machine, forward: Event, name: str) -> ast.expr | None:
    """Return the one condition of a batch under which alone a variable is used after a call, not in its other arm."""
    module, line = forward.module, getattr(forward.node, "end_lineno", 0)
    uses = [
        node
        for node in descend(module.body_around(forward.node))
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load) and node.lineno > line
    ]
    tests = [_test_over(machine, forward, use) for use in uses]
    first = tests[0] if tests else None
    return first if first is not None and all(test is first for test in tests) else None


def _test_over(machine: Machine, forward: Event, use: ast.AST) -> ast.expr | None:
    inner: ast.AST = use
    for around in forward.module.in_function(use):
        if isinstance(around, ast.If) and _is_of_batch(machine, forward, around.test):
            return around.test if any(one is inner for one in around.body) else None
        inner = around
    return None


def _is_of_batch(machine: Machine, forward: Event, test: ast.expr) -> bool:
    """Return whether a condition asks something that was made of the batch, where the forward is called."""
    for node in descend(test):
        held = [machine.store.get(scope, node.id) for scope in forward.scopes] if isinstance(node, ast.Name) else []
        value = next((one for one in reversed(held) if one is not None), None)
        if value is not None and not _OF_BATCH.isdisjoint(kind for kind, _ in tags_of(value)):
            return True
    return False
