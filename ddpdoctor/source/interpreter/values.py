"""The values of the rank projection: what is known of an expression on each of the four ranks looked at.

A value is the same thing on all ranks unless it is ``PerRank``. What is unknown is still known to be uniform (the same
on every rank) or varying.
"""

from __future__ import annotations

import ast
import builtins
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, TypeAlias

import msgspec

from ddpdoctor.files import regex

RANKS = (0, 1, 2, 3)
ALL_RANKS = 0b1111
"""Mask with one bit a rank."""
MAXIMUM_OPTIONS = 4
MAXIMUM_OBJECTS = 8
"""Of alternatives that all are objects of the project, or its classes: the meters of a progress bar, five trainers."""
MAXIMUM_WEIGHT = 20_000
"""Parts of a value at any depth: `x = (x, x, x)` has 3^n of them after n lines, and comparing two visits all."""
MAXIMUM_NESTING = 50
"""Values within values: `x = [x]` in 5,000 lines would take the stack of whoever compares two of them."""
Tag: TypeAlias = "tuple[str, int]"
"""What a value comes from: ``("batch", loader)``, ``("ddp", wrap)``, ``("world-size", 0)``."""
TASK_COUNT: Tag = ("task-count", 0)
"""Of the number of tasks that a cluster's launcher has started, where each of them spawns ranks."""
MEMBERS: Tag = ("members", 0)
"""Of a collection with a length that depends on what is in it."""


CLOCK: Tag = ("clock", 0)
"""Of a time."""
STAMP: Tag = ("clock", 1)
"""Of a time to the second at most, and nothing else that varies: ranks that read the clock together have the same."""
DRAWN: Tag = ("drawn", 0)
"""Tag of what comes from a generator that each rank has given a seed of its own."""
OWN_LENGTH: Tag = ("length", 0)
"""Of a tensor that is as long as a rank's own data makes it, as long as nothing may have changed that ..."""
OWN_ROWS: Tag = ("length", 1)
"""... and of the items of such a list."""
_LENGTHS = frozenset({OWN_LENGTH, OWN_ROWS})


class Const(msgspec.Struct, frozen=True):
    """A Python constant."""

    value: object


class Unknown(msgspec.Struct, frozen=True):
    """A value of which only the origin is known."""

    varying: bool = False
    """It may differ between ranks."""
    opaque: bool = False
    """It comes from outside of what was read, so that its name may show more than its origin."""
    tags: frozenset[Tag] = frozenset()
    not_none: bool = False
    """It is the outcome of arithmetic, or an extent, and so not None."""


class External(msgspec.Struct, frozen=True):
    """A module, class or function that is not of the project, by its full name."""

    name: str


class ProjectModule(msgspec.Struct, frozen=True):
    """A module of the project, by its dotted name."""

    name: str


class Function(msgspec.Struct, frozen=True):
    """A function or lambda of the project."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    module: str
    scope: int
    """The scope that its free names are looked up in."""
    receiver: Value | None = None
    """``self`` of a bound method."""
    owner: ProjectClass | None = None
    """The class whose body defines it."""
    gradients: bool = True
    """False under a ``no_grad`` decorator."""
    first_rank_only: bool = False
    """Decorated so that other ranks skip it."""


class ProjectClass(msgspec.Struct, frozen=True):
    """A class of the project."""

    node: ast.ClassDef
    module: str
    scope: int
    """The scope that holds its attributes."""


class Instance(msgspec.Struct, frozen=True):
    """An object of a project class; its attributes are in the store under its number."""

    number: int
    cls: ProjectClass


class ExternalObject(msgspec.Struct, frozen=True):
    """An object of an external class; its construction is in the projection's events under its number."""

    number: int
    name: str
    """Full name of the class."""


class BoundMethod(msgspec.Struct, frozen=True, dict=True):
    """A method of an external or unknown object, not yet called."""

    receiver: Value
    name: str


class Sharded(msgspec.Struct, frozen=True):
    """How a module is sharded."""

    everywhere: bool
    """Over all ranks of the job."""
    gathers: bool
    """Its forward runs collectives."""
    certain: bool
    """It was not made so under an undecided condition."""
    with_data: bool
    """Each rank has data of its own."""
    along_mesh: bool = False
    """Over the groups of a mesh, be it all of it or some dimensions."""


class Partial(msgspec.Struct, frozen=True, dict=True):
    """``functools.partial``."""

    function: Value
    positional: tuple[Value, ...] = ()
    named: tuple[tuple[str, Value], ...] = ()


class SequenceValue(msgspec.Struct, frozen=True, dict=True):
    """A list, tuple or set."""

    values: tuple[Value, ...]
    open: bool = False
    """It may hold any number of such items."""


class DictValue(msgspec.Struct, frozen=True, dict=True):
    """A dict with constant keys."""

    entries: tuple[tuple[object, Value], ...]


class TensorSize(msgspec.Struct, frozen=True):
    """A tensor made by a factory, of which the size is known."""

    elements: int
    size_bytes: int
    tags: frozenset[Tag] = frozenset()


class OneOf(msgspec.Struct, frozen=True, dict=True):
    """One of a few values, decided by a condition that is not known."""

    options: tuple[Value, ...]
    varying: bool = False
    """The condition may be decided differently by the ranks."""


class PerRank(msgspec.Struct, frozen=True, dict=True):
    """A value that differs between ranks: one entry a rank, none of them ``PerRank``."""

    values: tuple[Value, ...]
    guessed: bool = False
    """The variation was read from a name, not from an origin."""


Value: TypeAlias = (
    "Const | Unknown | External | ProjectModule | Function | ProjectClass | Instance | ExternalObject | BoundMethod"
    " | Partial | SequenceValue | DictValue | TensorSize | OneOf | PerRank"
)


class Arguments(msgspec.Struct, frozen=True):
    """What a call is given."""

    positional: Sequence[Value] = ()
    named: Mapping[str, Value] = {}
    complete: bool = True
    """All of it is known by position or name (no ``*`` or ``**`` of unknown content)."""

    @property
    def values(self) -> list[Value]:
        """All of it, whatever its place or name."""
        return [*self.positional, *self.named.values()]

    def value(self, name: str, position: int = -1) -> Value | None:
        """Return what is given by a name or at a position."""
        if name in self.named:
            return self.named[name]
        return self.positional[position] if 0 <= position < len(self.positional) else None


NO_ARGUMENTS = Arguments()
OPEN_ARGUMENTS = Arguments(complete=False)
"""What a function is given by a caller that was not read."""
_PLAIN = frozenset({Const, External, ProjectModule, Function, ProjectClass, Instance, ExternalObject, Partial})
"""Classes of values that are the same on all ranks and come from nothing in particular."""
_COMPOUND = frozenset({BoundMethod, Partial, SequenceValue, DictValue, OneOf, PerRank})
"""Classes of values that hold others."""
_SUMMED = _COMPOUND | {Unknown, TensorSize}
"""Classes of values that vary, have origins, or hold such."""
_NOTHING: frozenset[Tag] = frozenset()
NONE = Const(None)
TRUE = Const(True)
FALSE = Const(False)
UNIFORM = Unknown()
VARYING = Unknown(varying=True)
OPAQUE = Unknown(opaque=True)
BAR = "bar"
"""Kind of the tags of a bar of tqdm that some ranks alone have switched on; its items have none."""
BAR_COUNT = "bar-count"
"""Kind of the tags of what it has counted where it is on; the number is the line that makes it."""
SYNCHRONISED = Unknown(tags=frozenset({("agreed", 0)}))
"""What a collective made the same on every rank."""
STATISTIC = "statistic"
"""Kind of the tags of what was made of a statistic of the rank's own; the number is that of the ``Statistic``."""
REDUCED: Tag = ("reduced", 0)
"""Of what ``dist.reduce`` made whole on one rank alone."""
NO_GRADIENTS = External("torch.no_grad")
"""The context in which no gradients are recorded."""
UNSEEDED = ExternalObject(0, "unseeded")
"""State of a generator of random numbers to which each process gives its own."""
OPEN = ...
"""The key, in a dict, that stands for any others which it may have."""
NO_CONTEXT = External("contextlib.nullcontext")
"""The context that changes nothing."""
NO_SYNC = External("torch.nn.parallel.DistributedDataParallel.no_sync")
"""The context in which DDP does not synchronise."""


def on_rank(value: Value, rank: int) -> Value:
    """Return the value on one rank."""
    return value.values[rank] if isinstance(value, PerRank) else value


def per_rank(values: Sequence[Value], guessed: bool = False) -> Value:
    """Make one value of one entry a rank; equal entries collapse, unknown ones that differ from others vary."""
    first = values[0]
    if all(value == first for value in values[1:]):
        return first
    if all(isinstance(value, Unknown) for value in values):
        # That one rank's is an object does not tell it from the others': `turns = tqdm(turns)` counts the same.
        maybe = [msgspec.structs.replace(value, not_none=False) for value in values if isinstance(value, Unknown)]
        if all(value == maybe[0] for value in maybe):
            return maybe[0]
    return PerRank(tuple(varied(value) for value in values), guessed)


def partly_written(value: Value, old: Value, ranks: int) -> Value:
    """Return what a name holds that the ranks of a mask gave a value.

    Beside the lanes it keeps the value as it was made: these ranks made the same, though it differs from the rest's.
    """
    lanes = per_rank([on_rank(value if ranks >> rank & 1 else old, rank) for rank in RANKS])
    if isinstance(lanes, PerRank) and isinstance(value, Unknown) and not value.varying:
        lanes.__dict__["made"] = (ranks, value)
    return lanes


def as_made(value: PerRank, ranks: int) -> Value:
    """Return a value as the ranks of a mask have it, where these, or more, have made it together."""
    makers, made = value.__dict__.get("made", (0, value))
    return value if ranks & ~makers else made


def as_filled(value: PerRank, ranks: int) -> Value:
    """Return a container as it is on the ranks of a mask, where these fill it alike; another value as it is."""
    lanes = [value.values[rank] for rank in RANKS if ranks >> rank & 1]
    alike = all(isinstance(lane, (DictValue, SequenceValue)) and lane == lanes[0] for lane in lanes)
    return lanes[0] if lanes and alike else value


def by_rank(function: Callable[..., Value], *inputs: Value) -> Value:
    """Apply a function of plain values on every rank."""
    for value in inputs:
        if value.__class__ is PerRank:
            return _by_rank(function, inputs)
    return function(*inputs)


def _by_rank(function: Callable[..., Value], inputs: Sequence[Value]) -> Value:
    if len(inputs) == 1 and isinstance(inputs[0], PerRank):
        return varied(per_rank([function(value) for value in inputs[0].values], inputs[0].guessed))
    lanes = [value.values if isinstance(value, PerRank) else (value,) * len(RANKS) for value in inputs]
    return varied(per_rank([function(*entries) for entries in zip(*lanes, strict=True)], is_guessed(*inputs)))


def kinds_of_rank(*values: Value) -> frozenset[Tag]:
    """Return whether numbers are the same on every node (``rank-of-node``) or not (``rank-of-job``), by their lanes."""
    lanes = (value.values for value in values if isinstance(value, PerRank) and not value.guessed)
    half = len(RANKS) // 2
    return frozenset(("rank-of-node" if one[:half] == one[half:] else "rank-of-job", 0) for one in lanes)


def is_guessed(*values: Value) -> bool:
    """Return whether any of the values varies only because of its name."""
    return any(isinstance(value, PerRank) and value.guessed for value in values)


def is_varying(value: Value) -> bool:
    """Return whether a value may differ between ranks."""
    kind = value.__class__
    if kind is Unknown:
        return value.varying  # type: ignore[union-attr]
    return False if kind in _PLAIN or kind is TensorSize else _summary(value)[0]


def tags_of(value: Value) -> frozenset[Tag]:
    """Return the origins of a value."""
    kind = value.__class__
    if kind is Unknown or kind is TensorSize:
        return value.tags  # type: ignore[union-attr]
    return _NOTHING if kind in _PLAIN else _summary(value)[1]


def is_too_large(value: Value) -> bool:
    """Return whether a value has more parts, or parts within parts, than any walk over values should meet."""
    if value.__class__ not in _COMPOUND:
        return False
    _, _, weight, nesting = _summary(value)
    return weight > MAXIMUM_WEIGHT or nesting > MAXIMUM_NESTING


_Summary: TypeAlias = "tuple[bool, frozenset[Tag], int, int]"
_OF_ONE: _Summary = (False, _NOTHING, 1, 1)


def _summary(value: Value) -> _Summary:
    """Return whether a value varies, its origins, its parts at any depth, and how deep they stand; kept with it.

    A part that stands in a thousand places is looked at once.
    """
    kind = value.__class__
    if kind is Unknown or kind is TensorSize:
        return kind is Unknown and value.varying, value.tags, 1, 1  # type: ignore[union-attr]
    if kind not in _COMPOUND:
        return _OF_ONE
    kept: _Summary | None = value.__dict__.get("summary")
    if kept is None:
        varying = kind is PerRank or (kind is OneOf and value.varying)  # type: ignore[union-attr]
        tags, weight, nesting = _NOTHING, 1, 0
        previous: Value | None = None
        summary = _OF_ONE
        plain = kind is Partial  # A function is the same on all ranks, whatever it will be called with.
        for part in parts_of(value):
            if part is previous:  # Often one value several times over.
                weight += summary[2]
                continue
            if part.__class__ not in _SUMMED:  # A list of thousands of constants is summed after every append.
                weight, nesting = weight + 1, nesting or 1
                continue
            previous, summary = part, _summary(part)
            part_varies, part_tags, part_weight, part_nesting = summary
            weight += part_weight
            if part_nesting > nesting:
                nesting = part_nesting
            if not plain:
                varying = varying or part_varies
                if part_tags and part_tags is not tags:
                    tags = tags | part_tags
        kept = value.__dict__["summary"] = (varying, tags, weight, nesting + 1)
    return kept


def appended(sequence: SequenceValue, item: Value) -> SequenceValue:
    """Return a sequence with one more item; what is known of it as a whole is not looked for in all of them again."""
    varies, tags, weight, nesting = _summary(sequence)
    of_item = _summary(item)
    longer = SequenceValue((*sequence.values, item))
    longer.__dict__["summary"] = (
        varies or of_item[0],
        tags | of_item[1],
        weight + of_item[2],
        max(nesting, of_item[3] + 1),
    )
    return longer


OWN_FOLDER: Tag = ("folder", 0)
"""Of a path that differs by rank in its folder, and not in the name of the file: a copy of the same file."""


def in_own_folder(folder: Sequence[Value], name: Value) -> frozenset[Tag]:
    """Return the tag of a path whose folder differs by rank, with a name that does not."""
    own = any(is_varying(one) and not only_of_files(one) for one in folder) and not is_varying(name)
    return frozenset({OWN_FOLDER}) if own else frozenset()


def only_of_files(value: Value) -> bool:
    """Return whether a value is unknown because of what the file system holds, and of nothing else."""
    return isinstance(value, Unknown) and {kind for kind, _ in value.tags if kind != "item"} == {"files"}


def parts_of(value: Value) -> Iterator[Value]:
    """Yield the values that a compound value is made of."""
    if isinstance(value, (PerRank, SequenceValue)):
        yield from value.values
    elif isinstance(value, OneOf):
        yield from value.options
    elif isinstance(value, DictValue):
        yield from (item for _, item in value.entries)
    elif isinstance(value, BoundMethod):
        yield value.receiver
    elif isinstance(value, Partial):
        yield from (*value.positional, *(item for _, item in value.named))


def options_of(value: Value) -> Iterator[Value]:
    """Yield the alternatives of a value, across ranks and conditions."""
    if isinstance(value, PerRank):
        for entry in value.values:
            yield from options_of(entry)
    elif isinstance(value, OneOf):
        yield from value.options
    else:
        yield value


def derived(inputs: Iterable[Value], extra: frozenset[Tag] = frozenset()) -> Unknown:
    """Return an unknown value computed from others: it varies if one of them does, and has their origins, no length."""
    varying = beside = False
    tags = extra
    for value in inputs:
        kind = value.__class__
        if kind is Unknown:
            varies = value.varying  # type: ignore[union-attr]
            more: frozenset[Tag] = value.tags  # type: ignore[union-attr]
        elif kind in _PLAIN:
            continue
        else:
            varies = is_varying(value)
            more = tags_of(value)
        if varies:
            varying, beside = True, beside or STAMP not in more
        if more and more is not tags:
            tags = tags | more if tags else more
    tags = tags if tags.isdisjoint(_LENGTHS) else tags - _LENGTHS
    return Unknown(varying, tags=_beside_ranks(tags) if beside else tags)


def _beside_ranks(tags: frozenset[Tag]) -> frozenset[Tag]:
    """Return the origins of a value that holds more of a rank than a time to the second."""
    return tags - {STAMP} | {CLOCK} if STAMP in tags else tags


# The directives that write seconds, alone or in a whole time, with the flags that C libraries take before them.
_SECONDS = regex(r"%[-_#^0EO]*[SscXTr+]")


def stamped(value: Value, name: str, form: object) -> Value:
    """Return a time in a form, by ``strftime``, ``int`` or in a text: marked where that leaves no part of a second, and
    the same on all ranks where it leaves no second.
    """
    coarse = name == "int" or (name == "strftime" and isinstance(form, str) and "%" in form and "%f" not in form)
    if not coarse or not isinstance(value, Unknown) or CLOCK not in value.tags:
        return value
    if name == "strftime" and not _SECONDS.search(str(form)):
        # Ranks that start together have the same minute, and the same day.
        return Unknown(False, value.opaque, value.tags - {CLOCK}, value.not_none)
    return Unknown(value.varying, value.opaque, value.tags - {CLOCK} | {STAMP}, value.not_none)


def never_none(value: Value) -> Value:
    """Return a value as one that is not None, where nothing more is known of it."""
    if isinstance(value, Unknown) and not value.not_none:
        return Unknown(value.varying, value.opaque, value.tags, True)
    return value


def tagged(value: Value, extra: frozenset[Tag]) -> Value:
    """Add origins to a value, as far as it can carry them."""
    if isinstance(value, Unknown):
        return Unknown(value.varying, value.opaque, value.tags | extra, value.not_none)
    if isinstance(value, SequenceValue):
        return SequenceValue(tuple(tagged(item, extra) for item in value.values), value.open)
    if isinstance(value, DictValue):
        return DictValue(tuple((key, tagged(item, extra)) for key, item in value.entries))
    if isinstance(value, OneOf):
        return OneOf(tuple(tagged(item, extra) for item in value.options), value.varying)
    if isinstance(value, TensorSize):
        return Unknown(False, False, value.tags | extra)
    if isinstance(value, Const) and value.value is not None:
        return Unknown(False, False, extra)
    if isinstance(value, PerRank):
        return per_rank([tagged(entry, extra) for entry in value.values], value.guessed)
    return value


def join(one: Value | None, other: Value | None, varying: bool = False) -> Value:
    """Return what is known after a condition of which neither outcome is excluded.

    A value that depends on the rank wins over its uniform alternative, which a job without ranks would have; so does
    one that the ranks agreed on over what a rank had before.
    """
    if one is None or other is None or one == other:
        return one if one is not None else other if other is not None else UNIFORM
    if not varying and is_agreed(one) is not is_agreed(other):
        agreed, own = (one, other) if is_agreed(one) else (other, one)
        if is_varying(own):
            return agreed
    if isinstance(one, PerRank) or isinstance(other, PerRank):
        return _join_lanes(one, other, varying)
    if isinstance(one, Unknown) or isinstance(other, Unknown):
        return _join_unknown(one, other, varying)
    if isinstance(one, Const) and isinstance(other, Const) and one.value is not None and other.value is not None:
        return Unknown(varying)
    for empty, filled in ((one, other), (other, one)):
        if empty == DictValue(()) and isinstance(filled, DictValue) and is_open(filled) and not varying:
            return filled
    options = list(dict.fromkeys((*options_of(one), *options_of(other))))
    if len(options) > (MAXIMUM_OBJECTS if all(map(_is_of_objects, options)) else MAXIMUM_OPTIONS):
        entries = [entry for one in options if isinstance(one, DictValue) for _, entry in one.entries]
        if all(isinstance(one, DictValue) for one in options) and all(map(is_object, entries)):
            return DictValue(((OPEN, reduce(join, entries)),))  # Objects by names: any of them may be there.
        mixed = derived(options)
        return Unknown(mixed.varying or varying, False, mixed.tags)
    either = any(isinstance(value, OneOf) and value.varying for value in (one, other))
    return OneOf(tuple(options), varying or either)


def is_object(entry: Value) -> bool:
    """Return whether a value is an object of the project, or one of several."""
    return all(isinstance(option, Instance) for option in options_of(entry))


def _is_of_objects(option: Value) -> bool:
    """Return whether an alternative is an object, a class of the project, or a method of one of its objects."""
    bound = isinstance(option, Function) and isinstance(option.receiver, Instance)
    return bound or isinstance(option, (Instance, ExternalObject, ProjectClass))


def is_agreed(value: Value) -> bool:
    """Return whether a value is what a collective made the same on every rank."""
    return isinstance(value, Unknown) and not value.varying and ("agreed", 0) in value.tags


def _join_unknown(one: Value, other: Value, varying: bool) -> Value:
    mixed = derived((one, other))
    opaque = any(isinstance(value, Unknown) and value.opaque for value in (one, other))
    tags = mixed.tags | (_lengths_of(one) & _lengths_of(other))
    return Unknown(mixed.varying or varying, opaque, tags, not (_may_be_none(one) or _may_be_none(other)))


def _lengths_of(value: Value) -> frozenset[Tag]:
    """Return by which tags the length of a value is a rank's own; a list that is still empty will have any."""
    return frozenset({OWN_ROWS}) if value == SequenceValue(()) else tags_of(value) & _LENGTHS


def _may_be_none(value: Value) -> bool:
    if isinstance(value, Unknown):
        return not value.not_none
    return value == NONE or (isinstance(value, OneOf) and any(map(_may_be_none, value.options)))


def _join_lanes(one: Value, other: Value, varying: bool) -> Value:
    if not isinstance(other, PerRank) and not is_varying(other):
        return _beside_same(one, other)
    if not isinstance(one, PerRank) and not is_varying(one):
        return _beside_same(other, one)
    lanes = [join(on_rank(one, rank), on_rank(other, rank), varying) for rank in RANKS]
    # What is known of no rank differs between them all the same.
    return varied(per_rank(lanes, is_guessed(one, other)))


def _beside_same(own: Value, uniform: Value) -> Value:
    """Return lanes beside their uniform alternative, which a rank has as well that may hold such an object there, too.

    One rank that makes an object by the way, where all may have made one before, is no other than the rest.
    """
    kinds = {_kind_of_object(option) for option in options_of(uniform)} - {None}
    if not kinds or not isinstance(own, PerRank):
        return own
    lanes = [join(lane, uniform) if _kind_of_object(lane) in kinds else lane for lane in own.values]
    return per_rank(lanes, own.guessed)


def _kind_of_object(value: Value) -> str | ProjectClass | None:
    if isinstance(value, ExternalObject):
        return value.name
    return value.cls if isinstance(value, Instance) else None


def merged_results(results: Sequence[tuple[int, Value]], fallback: Value, ranks: int) -> Value:
    """Join what a function returned on the ranks that called it; ``fallback`` where it returned nothing."""
    if not results:
        return fallback
    by_rank: list[Value] = []
    for rank in RANKS:
        here = {id(value): on_rank(value, rank) for mask, value in results if mask >> rank & 1}.values()
        other = fallback if ranks >> rank & 1 else on_rank(results[0][1], rank)
        by_rank.append(reduce(join, here) if here else other)
    return per_rank(by_rank, is_guessed(*(value for _, value in results)))


def varied(value: Value) -> Value:
    """Return a value as one that differs between ranks, where nothing more is known of it."""
    if isinstance(value, Unknown) and not (value.varying and STAMP not in value.tags):
        return Unknown(True, value.opaque, _beside_ranks(value.tags), value.not_none)
    return value


def constant(value: Value) -> object:
    """Return the constant that a value is, or ``...`` when it is none."""
    return value.value if isinstance(value, Const) else ...


def is_open(value: Value) -> bool:
    """Return whether a dict may have other keys than those that are known."""
    return any(key is OPEN for one in options_of(value) if isinstance(one, DictValue) for key, _ in one.entries)


def truth(value: Value) -> bool | None:
    """Return whether a value (of one rank) is true; None when that is not known."""
    kind = value.__class__
    if kind is Unknown:
        return None
    if kind is Const:
        return bool(value.value)  # type: ignore[union-attr]
    if kind in _PLAIN:
        return True
    if isinstance(value, SequenceValue):
        return None if value.open else bool(value.values)
    if isinstance(value, DictValue):
        return None if is_open(value) else bool(value.entries)
    if isinstance(value, OneOf):
        outcomes = {truth(option) for option in value.options}
        return outcomes.pop() if len(outcomes) == 1 else None
    return None


BUILTINS = {name: External(f"builtins.{name}") for name in (*dir(builtins), "exit", "quit")}
"""What a name without an assignment or an import means."""
BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.Pow: operator.pow,
}
ORDERINGS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
"""What arithmetic and comparisons do, by their nodes."""
