"""The names of the parameters of wrapped modules in the order in which DDP counts them, as far as the source shows.

A module's own parameters come before those of its parts, and its parts in the order of their first assignment: DDP
counts those that need a gradient. Behind a part with unknown parameters no number is known.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.attributes import base_names, bases_of
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    Const,
    ExternalObject,
    Function,
    Instance,
    ProjectClass,
    SequenceValue,
    Value,
    constant,
    options_of,
)
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script.code_words import uses_part
from ddpdoctor.source.script.script import Script
from ddpdoctor.source.script.syntax_index import descend

_WEIGHT_AND_BIAS = re.compile(
    r"torch\.nn\.(Linear|Bilinear|Conv\dd|ConvTranspose\dd|LayerNorm|GroupNorm|BatchNorm\dd|SyncBatchNorm)$"
)
_WEIGHT = re.compile(r"torch\.nn\.(Embedding|EmbeddingBag|RMSNorm|PReLU)$")
_WITHOUT = re.compile(
    r"torch\.nn\.(\w*Loss|\w*ReLU6?|\w*ELU|Sigmoid|LogSigmoid|Tanh\w*|\w*[sS]oftmax\w*|Soft\w+|Hard\w+|SiLU|Mish"
    r"|\w*Dropout\w*|\w*Pool\dd|Flatten|Unflatten|Identity|Upsample|\w*Pad\dd|Pixel(?:Uns|S)huffle|Fold|Unfold"
    r"|CosineSimilarity|PairwiseDistance|InstanceNorm\dd|LocalResponseNorm)$"
)
_ATTENTION = "torch.nn.MultiheadAttention"
_CONTAINERS = frozenset({"torch.nn.Sequential", "torch.nn.ModuleList"})
_PARAMETER = "torch.nn.Parameter"
MOST_NAMES = 100_000


class _UnknownError(Exception):
    """The source does not show which parameter comes next."""


def parameter_names(script: Script) -> tuple[str, ...]:
    """Return the names by their numbers; fewer than there are where the source does not show them, or wraps differ."""
    if uses_part(script, ("requires_grad",)):
        return ()  # Which ones DDP counts is then decided elsewhere.
    projection = whole_projection(script)
    found: set[tuple[str, ...]] = set()
    for wrap in projection.in_course("wrap"):
        module = wrap.argument("module", 0)
        names: list[str] = []
        try:
            if module is None or len(list(options_of(module))) != 1:
                return ()
            for name in _names(projection.machine, module, ""):
                names.append(name)
                if len(names) >= MOST_NAMES:
                    break
        except _UnknownError:
            pass
        found.add(tuple(names))
    return found.pop() if len(found) == 1 else ()


def _names(machine: Machine, value: Value, prefix: str) -> Iterator[str]:
    if isinstance(value, (Const, Function, ProjectClass)):
        return
    if isinstance(value, Instance):
        yield from _of_instance(machine, value, prefix)
        return
    made = machine.object(value) if isinstance(value, ExternalObject) else None
    if made is None or not made.complete:
        raise _UnknownError
    if made.name in _CONTAINERS:
        parts = [part for item in made.positional for part in _items(item)]
        for number, part in enumerate(parts):
            yield from _names(machine, part, f"{prefix}{number}.")
    elif _WITHOUT.match(made.name):
        if "InstanceNorm" in made.name and made.named:
            raise _UnknownError
    else:
        yield from (f"{prefix}{name}" for name in _of_layer(made))


def _items(value: Value) -> tuple[Value, ...]:
    if not isinstance(value, SequenceValue):
        return (value,)
    if value.open:
        raise _UnknownError
    return value.values


def _of_layer(made: Event) -> tuple[str, ...]:
    switches = {name: constant(option) for name, option in made.named.items() if name in ("bias", "affine")}
    switches |= {name: constant(made.named[name]) for name in ("elementwise_affine",) if name in made.named}
    if any(not isinstance(switch, bool) for switch in switches.values()):
        raise _UnknownError
    if switches.get("affine") is False or switches.get("elementwise_affine") is False:
        return ()
    bias = () if switches.get("bias") is False else ("bias",)
    if _WEIGHT_AND_BIAS.match(made.name):
        if made.name == "torch.nn.Linear" and len(made.positional) > 2:
            raise _UnknownError
        return ("weight", *bias)
    if _WEIGHT.match(made.name):
        return ("weight",)
    if made.name == _ATTENTION and not made.named.keys() & {"kdim", "vdim", "add_bias_kv"}:
        inner = ("in_proj_bias",) if bias else ()
        return ("in_proj_weight", *inner, "out_proj.weight", *(f"out_proj.{name}" for name in bias))
    raise _UnknownError


def _of_instance(machine: Machine, value: Instance, prefix: str) -> Iterator[str]:
    if not _is_plain(machine, value.cls):
        raise _UnknownError
    attributes = [name for name in machine.store.names(value.number) if not name.startswith(("buffer ", "__"))]
    parts: list[tuple[str, Value]] = []
    for name in attributes:
        part = machine.store.get(value.number, name)
        if part is None:
            continue
        if isinstance(part, ExternalObject) and part.name == _PARAMETER:
            yield f"{prefix}{name}"
        else:
            parts.append((name, part))
    for name, part in parts:
        yield from _names(machine, part, f"{prefix}{name}.")


def _is_plain(machine: Machine, cls: ProjectClass) -> bool:
    """Return whether the parts of a module are assigned one after the other, whatever its arguments are."""
    if set(base_names(machine, cls)) != {"torch.nn.Module"} or any(
        isinstance(base, ProjectClass) for base in bases_of(machine, cls)
    ):
        return False
    for method in cls.node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            for node in descend(method):
                if isinstance(node, (ast.If, ast.For, ast.While, ast.Try, ast.With, ast.IfExp, ast.Match)):
                    return False
                if isinstance(node, ast.Attribute) and node.attr in {"add_module", "register_module", "apply"}:
                    return False
    return True
