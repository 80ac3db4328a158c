"""How many parameters a module has, as far as the arguments of its layers are numbers in the source."""

from __future__ import annotations

import re
from math import prod

from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import ExternalObject, Value, constant
from ddpdoctor.source.torch_model.buffers import parts_of_module

_CONVOLUTION = re.compile(r"torch\.nn\.Conv(Transpose)?(\d)d$")


def known_parameters(machine: Machine, module: Value) -> int:
    """Parameters in the layers of a module whose sizes are known: a lower bound of all."""
    total = 0
    for part in parts_of_module(machine, module):
        made = machine.object(part) if isinstance(part, ExternalObject) else None
        if made is not None:
            total += _of_layer(made)
    return total


def _of_layer(made: Event) -> int:
    if made.name == "torch.nn.Linear":
        inputs, outputs = _number(made, "in_features", 0), _number(made, "out_features", 1)
        return inputs * outputs + outputs
    if made.name == "torch.nn.Embedding":
        return _number(made, "num_embeddings", 0) * _number(made, "embedding_dim", 1)
    convolution = _CONVOLUTION.match(made.name)
    if convolution is not None:
        width = _number(made, "kernel_size", 2)
        return prod((_number(made, "in_channels", 0), _number(made, "out_channels", 1), width ** int(convolution[2])))
    return 0


def _number(made: Event, name: str, position: int) -> int:
    value = made.argument(name, position)
    number = constant(value) if value is not None else 0
    return number if isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 10**9 else 0
