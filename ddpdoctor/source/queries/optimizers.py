"""The optimizers of a script: where they are made, what they hold, and where they step."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import msgspec

from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import ExternalObject, Instance, Value, options_of
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.parameters import HAS_PARAMETERS
from ddpdoctor.source.queries.wrapped_models import innermost_loop, loop_nodes, training_events
from ddpdoctor.source.script.syntax_index import descend, made_from
from ddpdoctor.source.torch_model.recorded_calls import SHARDED

_NO_OPTIMIZERS = ("lr_scheduler", "swa_utils")


class Misplaced(msgspec.Struct, frozen=True, eq=False):
    """An optimizer that loses its state, or whose parameters are no longer the model's."""

    optimizer: Event
    cause: Event
    """Its step in the same loop, or the assignment that replaces what it holds."""
    replaced: bool
    sharded: bool = False
    """All of them were, as the model was sharded."""


def is_optimizer(value: Value) -> bool:
    """Return whether a value is an optimizer of torch."""
    return isinstance(value, ExternalObject) and _is_optimizer_name(value.name)


def is_training_state(value: Value) -> bool:
    """Return whether a value is an optimizer, a learning-rate scheduler or a gradient scaler."""
    return isinstance(value, ExternalObject) and (
        value.name.startswith("torch.optim.") or value.name.endswith(".GradScaler")
    )


def has_no_tensors(value: Value) -> bool:
    """Return whether a value is an object whose state is of plain numbers: a learning-rate scheduler or a scaler."""
    return isinstance(value, ExternalObject) and (
        value.name.startswith("torch.optim.lr_scheduler.") or value.name.endswith(".GradScaler")
    )


def optimizers(projection: Projection) -> Iterator[Event]:
    """Yield every construction of an optimizer of torch that the script comes to."""
    return (event for event in projection.in_course("object") if _is_optimizer_name(event.name))


def steps(projection: Projection) -> list[Event]:
    """Return every call of ``optimizer.step()`` or ``scaler.step(optimizer)`` of an optimizer that is known."""
    return [event for event in training_events(projection, "step") if stepped(event)]


def stepped(event: Event) -> frozenset[int]:
    """Return the numbers of the optimizers that a call of ``step`` moves."""
    candidates = [event.receiver, *event.positional]
    return frozenset(
        option.number
        for value in candidates
        if value is not None
        for option in options_of(value)
        if isinstance(option, ExternalObject) and is_optimizer(option)
    )


def holders(projection: Projection, optimizer: Event) -> list[Value]:
    """Return the models with ``parameters()`` in an optimizer's arguments, or in their variables."""
    asked = {
        event.node: event.receiver
        for event in training_events(projection, "parameters", "named_parameters")
        if event.receiver is not None and event.ordinal < optimizer.ordinal
    }
    body = optimizer.module.body_around(optimizer.node)
    return [receiver for node in made_from(optimizer.node, body) if (receiver := asked.get(node)) is not None]


def misplaced_optimizers(projection: Projection) -> Iterator[Misplaced]:
    """Yield optimizers made anew in every step, and optimizers whose model gets new modules afterwards."""
    made_steps = steps(projection)
    for optimizer in optimizers(projection):
        held = holders(projection, optimizer)
        if not held:
            continue
        loop = innermost_loop(optimizer)
        step = next(
            (
                s
                for s in made_steps
                if optimizer.ordinal in stepped(s) and loop is not None and innermost_loop(s) is loop
            ),
            None,
        )
        if step is not None and not _made_in(projection, held, loop) and not _once(optimizer):
            yield Misplaced(optimizer, step, replaced=False)
            continue
        sharding = _sharding(projection, optimizer, held)
        if sharding is not None:
            yield Misplaced(optimizer, sharding, replaced=False, sharded=True)
            continue
        replaced = _replacement(projection, optimizer, held)
        if replaced is not None:
            yield Misplaced(optimizer, replaced, replaced=True)


def _is_optimizer_name(name: str) -> bool:
    return name.startswith("torch.optim.") and not any(word in name for word in _NO_OPTIMIZERS)


def _once(optimizer: Event) -> bool:
    """Return whether it is made under a condition, so that a step may keep that of the step before."""
    return bool(optimizer.conditions)


def _made_in(projection: Projection, held: list[Value], loop: ast.AST | None) -> bool:
    """Return whether a model that an optimizer holds is made in the same loop, or at an unknown place."""
    for value in held:
        for option in options_of(value):
            if isinstance(option, ExternalObject):
                made = projection.machine.object(option)
                if made is None or loop in loop_nodes(made):
                    return True
            elif not isinstance(option, Instance) or _constructed_in(projection, option, loop):
                return True
    return False


def _constructed_in(projection: Projection, instance: Instance, loop: ast.AST | None) -> bool:
    for key, number in projection.machine.objects.items():
        if number == instance.number and isinstance(key[0], ast.AST):
            return loop is not None and any(node is key[0] for node in descend(loop))
    return True


def _sharding(projection: Projection, optimizer: Event, held: list[Value]) -> Event | None:
    """Return where the only model that an optimizer holds is sharded after it was built, under the same conditions."""
    if len(held) != 1 or any(training_events(projection, "add_param_group")):
        return None
    for event in training_events(projection, SHARDED):
        if event.ordinal > optimizer.ordinal and event.receiver == held[0] and event.conditions == optimizer.conditions:
            return event
    return None


def _replacement(projection: Projection, optimizer: Event, held: list[Value]) -> Event | None:
    """Return an assignment of a new module to a model that an optimizer holds and gets no new parameters of."""
    if any(training_events(projection, "add_param_group")):
        return None
    for event in training_events(projection, "set attribute"):
        if event.ordinal <= optimizer.ordinal or event.receiver not in held or event.conditions != optimizer.conditions:
            continue
        value = event.positional[0]
        fresh = (
            isinstance(value, ExternalObject)
            and value.name.startswith("torch.nn.")
            and HAS_PARAMETERS.search(value.name) is not None
        )
        if fresh and isinstance(value, ExternalObject) and value.number > optimizer.ordinal:
            return event
    return None
