"""Gradients of a DDP model that its reduction never sees, and training state that one rank alone loads."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator

from ddpdoctor.check import Verdict
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import NONE, ExternalObject, Value, options_of
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.divergence import guard_of
from ddpdoctor.source.queries.job_kind import is_distributed
from ddpdoctor.source.queries.origins import NAMED, Origins
from ddpdoctor.source.queries.wrapped_models import (
    PARAMETERS,
    averages_by_hand,
    innermost_loop,
    is_training_state,
    loop_nodes,
    training_events,
    training_forwards,
    wrap_numbers,
)
from ddpdoctor.source.ranks.ranks import FIRST_RANKS
from ddpdoctor.source.script.module import Module, descend, last_name
from ddpdoctor.source.script.script import uses_part
from ddpdoctor.source.vocabulary import OPTIMIZER

# What one rank loaded may reach the others by these.
_SHARES_STATE = (
    "broadcast_object_list", "scatter_object_list", "scatter_full_optim", "distribute_bn", "broadcast_optimizer",
)  # fmt: skip
# Variables, attributes and selections on the way from a gradient's inputs to where parameters are asked for.
_DEEPEST = 8
_KEPT_OUT = "this condition keeps the other ranks out"


def unreduced_gradients(projection: Projection) -> Iterator[Verdict]:
    """Calls of ``torch.autograd.grad`` for parameters, and second backward passes through one forward."""
    if averages_by_hand(projection.machine.script):
        return
    asked = {event.node for event in training_events(projection, *PARAMETERS)}
    origins = Origins(projection.machine.script.modules)
    for event in training_events(projection, "torch.autograd.grad"):
        outputs = event.argument("outputs", 0)
        inputs = _argument_node(event.node, "inputs", 1)
        for_parameters = inputs is not None and _are_parameters(origins, event.module, inputs, asked)
        if outputs is not None and wrap_numbers(outputs) and for_parameters:
            yield Verdict(
                sentence="torch.autograd.grad returns this rank's gradients: DDP does not average them",
                remedy="Use loss.backward(), or all-reduce the gradients by hand.",
                locations=event.location,
            )
    yield from _second_backwards(projection)


def _are_parameters(origins: Origins, module: Module, node: ast.expr, asked: set[ast.AST], depth: int = 0) -> bool:
    """Return whether an expression asks a module for its parameters, or selects of what does."""
    if any(one in asked for one in descend(node)) or depth > _DEEPEST:
        return depth <= _DEEPEST
    if isinstance(node, NAMED):
        found = origins.given(module, node)
    elif isinstance(node, (ast.ListComp, ast.GeneratorExp)):
        found = [(module, node.generators[0].iter)]
    else:
        selects = isinstance(node, ast.Call) and last_name(node.func) in ("list", "tuple", "filter")
        found = [(module, one) for one in node.args[-1:]] if selects else []  # type: ignore[attr-defined]
    return any(_are_parameters(origins, home, one, asked, depth + 1) for home, one in found)


def lonely_loads(projection: Projection) -> Iterator[Verdict]:
    """Loads of an optimizer, a scheduler or a scaler that only the first rank comes to."""
    if not is_distributed(projection) or uses_part(projection.machine.script, _SHARES_STATE):
        return
    seen: set[ast.AST] = set()
    loads = [event for event in projection.in_course("call") if event.name == "load_state_dict"]
    for event in loads:
        guard = guard_of(projection, event)
        if event.ranks not in FIRST_RANKS or event.receiver is None or guard is None or event.node in seen:
            continue
        options = [option for option in options_of(event.receiver) if isinstance(option, ExternalObject)]
        elsewhere = any(load.receiver == event.receiver and load.ranks & ~event.ranks for load in loads)
        if options and all(is_training_state(option) for option in options) and not elsewhere:
            seen.add(event.node)
            first = "rank 0" if event.ranks == 1 else "the first rank of each node"
            yield Verdict(
                sentence=f"only {first} loads the state of this {_class_of(options)}, and no wrapper of a model "
                "broadcasts it",
                locations=event.location,
                ranks=(0,) if event.ranks == 1 else (),
                because=(_KEPT_OUT, guard.location),
            )


def lonely_steps(projection: Projection) -> Iterator[Verdict]:
    """Steps of a scheduler that only the first rank comes to, where the others step with its optimizer all the same."""
    if not is_distributed(projection) or uses_part(projection.machine.script, _SHARES_STATE):
        return
    if any(walk.uncertain for walk in projection.walks):
        return  # The others may step it where they were not followed.
    steps = [(event, _stepped(event)) for event in training_events(projection, "step")]
    seen: set[ast.AST] = set()
    for event, stepped in steps:
        guard = guard_of(projection, event)
        options = list(options_of(event.receiver or NONE))
        if event.ranks not in FIRST_RANKS or guard is None or guard.guessed or event.node in seen:
            continue
        made = [projection.machine.object(option) for option in options]
        schedulers = [one for one in made if one is not None and "lr_scheduler" in one.name]
        others = {number for step, numbers in steps if step.ranks & ~event.ranks for number in numbers}
        if not options or len(schedulers) < len(options) or stepped & others:
            continue
        optimizers = [one.argument("optimizer", 0) or NONE for one in schedulers]
        if all(_numbers(optimizer) & others for optimizer in optimizers):
            seen.add(event.node)
            what = _class_of([one for one in options if isinstance(one, ExternalObject)])
            yield Verdict(
                sentence=f"only the first rank steps this {what}: from then on the others train with another learning "
                "rate",
                remedy="Step it on every rank.",
                locations=event.location,
                because=(_KEPT_OUT, guard.location),
            )


def _stepped(event: Event) -> set[int]:
    """Return the numbers of the objects that a step is of: its own, or what a scaler or an accelerator is given."""
    return _numbers(event.receiver or NONE) | _numbers(event.argument("optimizer", 0) or NONE)


def _numbers(value: Value) -> set[int]:
    return {option.number for option in options_of(value) if isinstance(option, ExternalObject)}


def _class_of(options: list[ExternalObject]) -> str:
    names = {option.name for option in options}
    if len(names) == 1 and OPTIMIZER not in names:
        return options[0].name.rpartition(".")[2]
    return "scheduler" if all("lr_scheduler" in name for name in names) else "optimizer"


def _second_backwards(projection: Projection) -> Iterator[Verdict]:
    """Backward passes through the only DDP model after one with ``retain_graph=True``, with no forward between."""
    wraps = list(projection.of_kind("wrap"))
    if len(wraps) != 1:
        return
    number = wraps[0].ordinal
    forwards = training_forwards(projection, number)
    passes = [event for event in projection.in_course("backward") if wrap_numbers(event.receiver) == {number}]
    for first, second in itertools.pairwise(passes):
        flag = _argument_node(first.node, "retain_graph", 1)
        retains = isinstance(flag, ast.Constant) and flag.value is True
        alike = loop_nodes(first) == loop_nodes(second) and first.conditions == second.conditions
        between = any(first.ordinal < event.ordinal < second.ordinal for event in forwards)
        before = any(
            event.ordinal < first.ordinal and innermost_loop(event) is innermost_loop(first) for event in forwards
        )
        if retains and alike and before and not between and first.node is not second.node:
            yield Verdict(
                sentence="the gradients of this second backward are not averaged: DDP reduced those of the first",
                remedy="Add the losses and call backward once.",
                locations=second.location,
                because=("the first backward through the same forward", first.location),
            )


def _argument_node(call: ast.AST, name: str, position: int) -> ast.expr | None:
    if not isinstance(call, ast.Call):
        return None
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    return call.args[position] if position < len(call.args) else None
