"""Optimizers and schedulers that a condition, a table or a function of the project chooses."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ddpdoctor.source.interpreter.values import BoundMethod, ExternalObject, OneOf, Value, options_of
from ddpdoctor.source.vocabulary import OPTIMIZER

_SCHEDULER = "torch.optim.lr_scheduler.LRScheduler"


def method_of_any(options: Sequence[Value]) -> BoundMethod | None:
    """Return one method of whichever optimizer it is; None where some option is something else."""
    methods = [option for option in options if isinstance(option, BoundMethod) and _is_training_state(option.receiver)]
    if len(methods) < len(options) or len({method.name for method in methods}) != 1:
        return None
    return BoundMethod(OneOf(tuple(method.receiver for method in methods)), methods[0].name)


def of_any_class(made: Value) -> Value | None:
    """Return what one of several functions makes as an optimizer or a scheduler of unknown class; None for others."""
    options = list(options_of(made))
    if not options or not all(_is_training_state(option) for option in options):
        return None
    first = options[0]
    assert isinstance(first, ExternalObject)
    return msgspec.structs.replace(first, name=_SCHEDULER if "lr_scheduler" in first.name else OPTIMIZER)


def _is_training_state(value: Value) -> bool:
    return isinstance(value, ExternalObject) and value.name.startswith("torch.optim.")
