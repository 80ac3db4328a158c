"""Draws by a seed of the rank's own: generators, and environments that are played."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from ddpdoctor.source.interpreter.assignment import overwrite
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    BoundMethod,
    DictValue,
    ExternalObject,
    Function,
    Instance,
    OneOf,
    SequenceValue,
    Tag,
    Unknown,
    Value,
    derived,
    is_guessed,
    is_varying,
    parts_of,
    tags_of,
)
from ddpdoctor.source.script.syntax_index import descend

DRAWN: Tag = ("drawn", 0)
"""Tag of what comes from a generator that each rank has given a seed of its own."""
_TAKES_SEED = frozenset({"manual_seed", "seed", "Random", "RandomState", "default_rng"})
"""Functions and methods whose first argument is a seed; others have a keyword of that name."""
_DRAWS = frozenset(
    f"torch.{name}"
    for name in ("bernoulli", "multinomial", "normal", "poisson", "rand", "rand_like", "randint", "randn", "randn_like")
)
"""Draws from torch's own generator, whose seed is one constant on all ranks until the script sets another."""
_GENERATOR = "torch.Generator"
_OWN_ORIGINS = frozenset({"clock", "random", "drawn", "store", "own", "batch", "part"})
"""Kinds of the tags of what no two ranks have alike."""


def drawn_apart(
    machine: Machine,
    node: ast.AST,
    function: Value,
    name: str,
    positional: Sequence[Value],
    named: Mapping[str, Value],
    result: Value,
) -> Value:
    """Return the result of a call; after one that seeds by the rank, it and its object draw the rank's own numbers."""
    generator = named.get("generator")
    if generator is None and draws_by_rank(machine, name):
        return Unknown(True, False, frozenset({DRAWN}))
    if generator is not None and DRAWN in tags_of(generator) and not isinstance(result, ExternalObject):
        return Unknown(True, False, frozenset({DRAWN}))
    seed = named.get("seed")
    if seed is None and positional and name.rpartition(".")[2] in _TAKES_SEED:
        seed = positional[0]
    if seed is None or not is_own_seed(seed) or not isinstance(result, Unknown) or _is_guessed(machine, node):
        return result
    if isinstance(function, BoundMethod) and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        receiver = function.receiver
        if isinstance(receiver, (Unknown, BoundMethod)) or _is_own(receiver):
            overwrite(machine, node.func.value, Unknown(True, True, tags_of(receiver) | {DRAWN}))
    return Unknown(True, result.opaque, result.tags | {DRAWN})


def draws_by_rank(machine: Machine, name: str) -> bool:
    """Return whether a function draws from torch's generator after the ranks have seeded that differently."""
    return machine.draws_apart and name in _DRAWS


def is_own_seed(seed: Value) -> bool:
    """Return whether a seed differs between ranks; the epoch of a checkpoint does not, which all of them find alike."""
    return is_varying(seed) and not is_found_alike(seed)


def is_found_alike(value: Value) -> bool:
    """Return whether a value differs between ranks only where their disks do, which they mostly share."""
    if isinstance(value, (SequenceValue, DictValue)) or (isinstance(value, OneOf) and not value.varying):
        return all(is_found_alike(part) for part in parts_of(value) if is_varying(part))
    kinds = {kind for kind, _ in value.tags} if isinstance(value, Unknown) else set()
    return "files" in kinds and kinds.isdisjoint(_OWN_ORIGINS)


def of_unread(machine: Machine, function: Function, arguments: Sequence[Value]) -> Value:
    """Return the result of an unread function of the project; with an object that draws by the rank, it varies."""
    result = derived(arguments)
    players = [*arguments, *(() if function.receiver is None else (function.receiver,))]
    if any(isinstance(player, Instance) and _draws(machine, player) for player in players):
        return Unknown(True, False, result.tags | {DRAWN})
    return result


def _draws(machine: Machine, player: Instance) -> bool:
    held = (machine.store.get(player.number, name) for name in machine.store.names(player.number))
    return any(DRAWN in tags_of(value) for value in held if value is not None)


def _is_own(receiver: Value) -> bool:
    """Return whether an object may draw for the rank alone: torch's generator, or anything that is not torch's."""
    return isinstance(receiver, ExternalObject) and (
        receiver.name == _GENERATOR or not receiver.name.startswith("torch.")
    )


def _is_guessed(machine: Machine, node: ast.AST) -> bool:
    """Return whether a rank in the arguments is one by its name alone: environments are numbered so as well."""
    arguments = [*node.args, *(word.value for word in node.keywords)] if isinstance(node, ast.Call) else []
    names = (inner for argument in arguments for inner in descend(argument) if isinstance(inner, ast.Name))
    return any(is_guessed(machine.evaluate(machine, inner)) for inner in names)
