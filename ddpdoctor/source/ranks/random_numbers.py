"""Random numbers: which generator draws them, what seed that has, and so whether all ranks draw the same.

The walk keeps the state of a generator as a value in the store, that of torch's generators with these objects, so that
conditions and ranks are joined there as those of variables are. A state is the seeding that made it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial

from ddpdoctor.files import regex
from ddpdoctor.source.events import Event, Placed
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    ALL_RANKS,
    DRAWN,
    NONE,
    UNSEEDED,
    Arguments,
    BoundMethod,
    DictValue,
    ExternalObject,
    Function,
    Instance,
    OneOf,
    PerRank,
    SequenceValue,
    Tag,
    TensorSize,
    Unknown,
    Value,
    derived,
    is_guessed,
    is_varying,
    join,
    options_of,
    parts_of,
    tagged,
    tags_of,
)
from ddpdoctor.source.script.module import descend, last_name, made_from, once
from ddpdoctor.source.script.script import Script
from ddpdoctor.source.vocabulary import SEEDING, SEEDS_EVERYTHING

PYTHONS, NUMPYS, TORCHS, OWN = range(4)
"""The generators of ``random``, of ``numpy.random`` and of torch that a process has, and one that it makes."""
ALIKE, BY_RANK, UNREAD = "seeded alike", "seeded by rank", "perhaps seeded"
"""What made the state of a generator, beside ``UNSEEDED``: one seed, a seed a rank, or a call that was not read."""
DRAWN_UNSEEDED: Tag = ("unseeded", TORCHS)
"""Of a tensor that torch's generator filled without a seed: every rank has other numbers."""
_DIFFERING = frozenset({UNSEEDED.name, BY_RANK})
_RANDOM = regex(r"^(random|numpy\.random|torch)\.")
_GENERATOR = "torch.Generator"
TAKES_SEED = frozenset({"manual_seed", "seed", "Random", "RandomState", "default_rng"})
"""Functions and methods whose first argument is a seed; others have a keyword of that name."""
# Draws from torch's own generator, which begins each process with a seed of its own.
_DRAWS = frozenset(
    f"torch.{name}"
    for name in ("bernoulli", "multinomial", "normal", "poisson", "rand", "rand_like", "randint", "randn", "randn_like")
)
DATA_METHODS = frozenset({"shuffle", "train_test_split"})
"""Methods of the data sets of Hugging Face that draw random numbers."""
ORDERING_METHODS = frozenset({"shuffle", "permutation", "permuted", "sample"})
"""Methods of generators that put something in a random order."""
ORDERS: dict[str, int] = {
    "torch.utils.data.random_split": TORCHS,
    "torch.randperm": TORCHS,
    **dict.fromkeys(("sklearn.model_selection.train_test_split", *DATA_METHODS), NUMPYS),
    **dict.fromkeys((f"numpy.random.{name}" for name in ("permutation", "shuffle", "choice")), NUMPYS),
    **dict.fromkeys(("random.shuffle", "random.sample"), PYTHONS),
}
"""What puts something in a random order or splits it, and whose generator it does it with."""
FORGETS_ORDER = frozenset({"sorted", "sort", "len", "set", "frozenset", "sum", "min", "max", "mean", "Counter"})
"""Functions whose result depends on no order."""
# What asks for a seed or for a state, and what sets a state.
_ASKS = frozenset({"initial_seed", "get_seed", "get_rng_state"})
_RESTORES = frozenset({"set_rng_state", "setstate", "set_state"})
# Kinds of the tags of what no two ranks have alike.
_OWN_ORIGINS = frozenset({"clock", "random", "drawn", "store", "own", "batch", "part"})


def generator_of(name: str) -> int:
    """Return whose random numbers a library function draws or seeds, by its full name; -1 where that is not known."""
    if name in ORDERS:
        return ORDERS[name]
    match = _RANDOM.match(name)
    return -1 if match is None else {"random": PYTHONS, "numpy.random": NUMPYS, "torch": TORCHS}[match[1]]


@lru_cache(maxsize=16_384)
def draws(name: str) -> bool:
    """Return whether a library function draws random numbers, by its full name."""
    by_library = generator_of(name) in (PYTHONS, NUMPYS) and name not in SEEDS
    return name in ORDERS or name in _DRAWS or (by_library and name.rpartition(".")[2] not in TAKES_SEED | _ASKS)


def orders(function: Value, name: str, given: Arguments) -> bool:
    """Return whether a call puts something in a random order, or draws such an order."""
    if isinstance(function, BoundMethod):
        return name in ORDERING_METHODS and draws_by_itself(function.receiver)
    of_one = name == "numpy.random.choice" and given.value("size", 1) is None
    return name in ORDERS and not name.endswith("_split") and not of_one


@lru_cache(maxsize=16_384)
def _may_seed(name: str) -> bool:
    """Return whether a call may give generators of the process a seed, by its name alone."""
    last = name.rpartition(".")[2]
    asks = name in SEEDS or last in _ASKS
    return not asks and (last in _RESTORES or SEEDING.search(last) is not None)


def state_of(machine: Machine, generator: int | Value) -> Value:
    """Return the state of a generator of the process, or of one that a call is given."""
    if isinstance(generator, int):
        return machine.store.get(-1, f"state {generator}") or UNSEEDED
    tags = tags_of(generator)
    kind = BY_RANK if DRAWN in tags else UNREAD if is_varying(generator) else ALIKE
    return UNSEEDED if kind == UNREAD and ("random", OWN) in tags else ExternalObject(0, kind)


def differs(state: Value) -> bool:
    """Return whether ranks certainly draw different numbers from a generator in this state."""
    return all(one.name in _DIFFERING for one in _states(state))


def is_alike(state: Value) -> bool:
    """Return whether all ranks draw the same numbers from a generator in this state, as far as they draw as often."""
    return not isinstance(state, PerRank) and all(one.name == ALIKE for one in _states(state))


def seeds_by_rank(machine: Machine) -> bool:
    """Return whether each rank has given a generator of its process a seed of its own."""
    return any(is_by_rank(state_of(machine, one)) for one in (PYTHONS, NUMPYS, TORCHS))


def is_by_rank(state: Value) -> bool:
    """Return whether each rank has given a generator a seed of its own."""
    return all(one.name == BY_RANK for one in _states(state))


def _states(state: Value) -> list[ExternalObject]:
    return [one if isinstance(one, ExternalObject) else ExternalObject(0, UNREAD) for one in options_of(state)]


def state_at(machine: Machine, event: Event) -> Value | None:
    """Return in which state a recorded draw finds its generator."""
    return machine.draws.get((event.node, event.chain[1:]))


def seed_before(machine: Machine, state: Value) -> ast.AST | None:
    """Return the call that made a state."""
    made = [machine.maker_of(one.number) for one in _states(state) if one.number]
    seed = made[-1][0] if made and isinstance(made[-1], tuple) else None
    return seed if isinstance(seed, ast.AST) else None


def has_seed(call: ast.Call, body: ast.AST) -> bool:
    """Return whether a call draws from a generator that it is given, or that its body makes with a seed."""
    if any(word.arg == "generator" for word in call.keywords):
        return True
    made = made_from(call.func.value, body) if isinstance(call.func, ast.Attribute) else ()
    return any(isinstance(one, ast.Call) and one.args and last_name(one.func) in TAKES_SEED for one in made)


# What calls do to generators.


def seed(generators: Sequence[int], machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Give the generators of a process a seed."""
    for generator in generators:
        _put(machine, generator, _seeded_by(machine, node, given))
    return derived(given.values)


SEEDS = {
    **dict.fromkeys(("torch.manual_seed", "torch.random.manual_seed", "torch.seed"), partial(seed, (TORCHS,))),
    "random.seed": partial(seed, (PYTHONS,)),
    "numpy.random.seed": partial(seed, (NUMPYS,)),
    **dict.fromkeys(SEEDS_EVERYTHING, partial(seed, (PYTHONS, NUMPYS, TORCHS))),
}
"""Functions that give generators of a process a seed."""


def _seeded_by(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    seeds = [one for one in given.values if one != NONE]
    own = any(map(is_own_seed, seeds))
    if not seeds:
        return UNSEEDED
    kind = BY_RANK if own else UNREAD if any(map(is_varying, seeds)) else ALIKE
    return ExternalObject(machine.object_number((node, "seed")), kind)


def _put(machine: Machine, generator: int, state: Value) -> None:
    everywhere = machine.mask == ALL_RANKS & ~machine.gone
    machine.store.set(-1, f"state {generator}", state, ALL_RANKS if everywhere else machine.mask)


def drawn(
    machine: Machine, node: ast.AST, function: Value, name: str, given: Arguments, result: Value
) -> tuple[Value, Value | None]:
    """Return the result of a call that may seed a generator or draw from one, and what becomes of a method's object."""
    last = name.rpartition(".")[2]
    receiver = function.receiver if isinstance(function, BoundMethod) else None
    if isinstance(receiver, ExternalObject) and receiver.name == _GENERATOR:
        if last == "seed" or last in _RESTORES:
            return result, Unknown(True, True, frozenset({("random", OWN)} if last == "seed" else ()))
        if last == "manual_seed" and not any(map(is_own_seed, given.values)):
            return receiver, None
    elif _may_seed(name):
        _perhaps_seeded(machine, node, name if receiver is None else "", given)
    if receiver is not None:
        by_receiver = last in ORDERING_METHODS and draws_by_itself(receiver)
        if by_receiver or last in DATA_METHODS:
            own = receiver if by_receiver else _generator_given(last, given)
            _note(machine, node, state_of(machine, NUMPYS if own is None else own))
    elif draws(name):
        own = _generator_given(name, given)
        library = generator_of(name)
        state = state_of(machine, library if own is None else own)
        _note(machine, node, state)
        return _numbers(machine, name, library if own is None else OWN, state, given, result), None
    return _played(machine, node, receiver, last, given, result)


def draws_by_itself(value: Value) -> bool:
    """Return whether a value is a generator that each rank has given a seed of its own, or none, or comes from one."""
    tags = tags_of(value)
    return DRAWN in tags or ("random", OWN) in tags


def _generator_given(name: str, given: Arguments) -> Value | None:
    """Return the generator or the seed that a call is given."""
    last = name.rpartition(".")[2]
    places = (("generator", 2 if last == "random_split" else -1), ("random_state", -1), ("seed", -1))
    found = (given.value(word, place) for word, place in places)
    return next((one for one in found if one is not None and one != NONE), None)


def _note(machine: Machine, node: ast.AST, state: Value) -> None:
    if machine.aside:
        machine.draws_aside[machine.object_number(node)] = Placed(node, machine.frame.module), state
    elif not machine.quiet:
        at = node, tuple(reversed(machine.calls))
        known = machine.draws.get(at)
        machine.draws[at] = state if known is None else join(known, state)


def _numbers(machine: Machine, name: str, generator: int, state: Value, given: Arguments, result: Value) -> Value:
    """Return the random numbers that a function gives."""
    if isinstance(result, ExternalObject) or (name in ORDERS and generator == TORCHS):
        return result
    if is_by_rank(state):
        return Unknown(True, False, frozenset({DRAWN}))
    if generator in (PYTHONS, NUMPYS):
        return derived(given.values) if is_alike(state) else result
    if not differs(state):
        return result
    # One number decides something, as the data of an example do not.
    if generator == OWN or (getattr(result, "elements", 1) == 1 and TORCHS not in seeded(machine.script)):
        return Unknown(True, False, frozenset({("random", generator)}))
    if isinstance(result, TensorSize):
        return TensorSize(result.elements, result.size_bytes, result.tags | {DRAWN_UNSEEDED})
    return tagged(result, frozenset({DRAWN_UNSEEDED}))


def _perhaps_seeded(machine: Machine, node: ast.AST, name: str, given: Arguments) -> None:
    """Note what a call may do of which only the name is known; with a seed by rank, states that differ stay so."""
    head = name.partition(".")[0]
    heads = {"torch": (TORCHS,), "numpy": (NUMPYS,), "random": (PYTHONS,)}
    for generator in heads.get(head, (PYTHONS, NUMPYS, TORCHS)):
        before = state_of(machine, generator)
        if head in heads and not differs(before):
            continue  # The generators of devices are not those of the data.
        stays = differs(before) and any(map(is_own_seed, given.values))
        kind = UNREAD if not stays else BY_RANK if is_by_rank(before) else UNSEEDED.name
        _put(machine, generator, ExternalObject(machine.object_number((node, "seed")), kind))


# Objects that play: environments and generators which are seeded by the rank.


def _played(
    machine: Machine, node: ast.AST, receiver: Value | None, last: str, given: Arguments, result: Value
) -> tuple[Value, Value | None]:
    """Return the result of a call; after one that seeds by the rank, it and its object draw the rank's own numbers."""
    seed = given.named.get("seed")
    if seed is None and given.positional and last in TAKES_SEED:
        seed = given.positional[0]
    if seed is None or not is_own_seed(seed) or not isinstance(result, Unknown) or _is_guessed(machine, node):
        return result, None
    name = receiver.name if isinstance(receiver, ExternalObject) else ""
    of_torch = name.startswith("torch.") and name != _GENERATOR
    plays = isinstance(receiver, (Unknown, BoundMethod, ExternalObject)) and not of_torch
    own = Unknown(True, True, tags_of(receiver) | {DRAWN}) if plays and receiver is not None else None
    return Unknown(True, result.opaque, result.tags | {DRAWN}), own


def draws_own(machine: Machine, name: str) -> bool:
    """Return whether a function fills a tensor from torch's generator, without a seed or with one by rank."""
    state = state_of(machine, TORCHS) if name in _DRAWS else None
    return state is not None and (is_by_rank(state) or (differs(state) and TORCHS not in seeded(machine.script)))


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
    held = (value for one in players if isinstance(one, Instance) for value in machine.store.held(one.number))
    if any(DRAWN in tags_of(value) for value in held):
        return Unknown(True, False, result.tags | {DRAWN})
    return result


def _is_guessed(machine: Machine, node: ast.AST) -> bool:
    """Return whether a rank in the arguments is one by its name alone: environments are numbered so as well."""
    arguments = [*node.args, *(word.value for word in node.keywords)] if isinstance(node, ast.Call) else []
    names = (inner for argument in arguments for inner in descend(argument) if isinstance(inner, ast.Name))
    return any(is_guessed(machine.evaluate(inner)) for inner in names)


@once
def seeded(script: Script) -> frozenset[int]:
    """Return the generators that a script gives a seed; a function of unknown code that may seed, by its name, all."""
    return frozenset(_seeded(script))


def _seeded(script: Script) -> Iterator[int]:
    own = {function.name for module in script.modules for function in module.index.of(ast.FunctionDef)}
    for module in script.modules:
        for name in filter(SEEDING.search, module.calls_by_name):
            for call in module.calls_by_name[name]:
                generator = generator_of(module.resolve(call.func))
                if generator >= 0:
                    yield generator
                elif name not in own and not name.startswith("manual_seed"):  # of one of torch's generators
                    yield from (PYTHONS, NUMPYS, TORCHS)
