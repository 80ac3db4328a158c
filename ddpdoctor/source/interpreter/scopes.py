"""Variables, the frames that see them, and the parameters that fill them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial, reduce
from typing import TypeAlias

import msgspec

from ddpdoctor.finding import Frame
from ddpdoctor.source.events import LoopAround, OwnTest, Skip
from ddpdoctor.source.interpreter.values import (
    ALL_RANKS,
    OPAQUE,
    RANKS,
    UNIFORM,
    Arguments,
    BoundMethod,
    Const,
    DictValue,
    Function,
    PerRank,
    SequenceValue,
    Tag,
    Unknown,
    Value,
    derived,
    is_too_large,
    is_varying,
    join,
    on_rank,
    partly_written,
    per_rank,
    tags_of,
)
from ddpdoctor.source.script.module import Module


class Signature(msgspec.Struct, frozen=True):
    """Parameters by name."""

    names: tuple[str, ...]
    """Those that may be given by position."""
    all_names: tuple[str, ...]
    """Those, and the ones that can only be given by name."""
    defaults: Mapping[str, ast.expr]
    rest: str
    """Name of ``*args``; empty when there is none."""
    named_rest: str
    """Name of ``**kwargs``; empty when there is none."""


@lru_cache(maxsize=1_024)
def signature_of(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> Signature:
    """Read the parameters of a function."""
    arguments = node.args
    names = tuple(argument.arg for argument in (*arguments.posonlyargs, *arguments.args))
    defaults = dict(zip(reversed(names), reversed(arguments.defaults), strict=False))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if default is not None:
            defaults[argument.arg] = default
    return Signature(
        names=names,
        all_names=(*names, *(argument.arg for argument in arguments.kwonlyargs)),
        defaults=defaults,
        rest=arguments.vararg.arg if arguments.vararg is not None else "",
        named_rest=arguments.kwarg.arg if arguments.kwarg is not None else "",
    )


Cell = tuple[int, str]
"""A scope or an object by its number, and a name in it."""


ARGUMENTS = "__arguments__"
"""Name, among the attributes of an object, of what its construction was given."""
NEVER = 1 << 60
"""Larger than any number of a scope."""


OF_UNKNOWN_PLACES, OF_UNKNOWN_NAMES = "*", "**"
"""Keys of what a call is given as ``*batch`` or ``**settings``: its result derives from that as well."""


def bound(signature: Signature, values: Sequence[Value], arguments: Arguments) -> dict[str, Value]:
    """Return the parameters with what a call gives them; ``values`` are those by position, ``self`` among them."""
    names, complete = signature.names, arguments.complete
    given: dict[str, Value] = dict(zip(names, values, strict=False))
    rest = dict(arguments.named)
    places, unpacked = (_unpacked(rest.pop(key, None)) for key in (OF_UNKNOWN_PLACES, OF_UNKNOWN_NAMES))
    # A parameter without a default has its value from there; one that has a default is mostly left out.
    required = OPAQUE if complete else _unpacked(derived((places, unpacked)))
    for name in signature.all_names:
        if name in rest:
            given[name] = rest.pop(name)
        elif name not in given:
            given[name] = _default(signature.defaults.get(name), complete, required)
    if signature.rest:
        extra = values[len(names) :]
        given[signature.rest] = SequenceValue(tuple(extra)) if complete else SequenceValue((places,), open=True)
    if signature.named_rest:
        given[signature.named_rest] = DictValue(tuple(rest.items())) if complete else OPAQUE if rest else unpacked
    return given


def _unpacked(value: Value | None) -> Value:
    """Return any item of what a call unpacks: nothing is known of it but where it comes from."""
    return OPAQUE if value is None else Unknown(is_varying(value), opaque=True, tags=tags_of(value))


def _default(default: ast.expr | None, complete: bool, required: Value) -> Value:
    if default is None:
        return required
    if not complete:
        return OPAQUE
    if isinstance(default, ast.Constant):
        return Const(default.value)
    if isinstance(default, ast.UnaryOp) and isinstance(default.operand, ast.Constant):
        return Const(-default.operand.value) if isinstance(default.operand.value, int) else UNIFORM
    return OPAQUE


SIZES = frozenset({"world-size", "local-world-size", "device-count"})
"""Kinds of the tags of numbers of ranks."""


_DEVICES = frozenset({("device-count", 0)})


# Before a name, that of the cell which holds the mask of the ranks that gave it a value: no name begins so.
_MAKERS = "?"


class Store:
    """Values by scope and name."""

    def __init__(self) -> None:
        self.owners: dict[int, dict[str, Value | None]] = {}
        """By scope or object its names in the order of their first assignment; None for one that was taken back."""
        self.journals: list[dict[Cell, Value | None]] = []
        self.rank_names: set[str] = set()
        """Names that held a number which differs by rank, whatever they are."""
        self.size_names: set[str] = set()
        """Names that held a number of ranks."""
        self.device_counts: set[str] = set()
        """Names that held nothing but the number of a node's devices."""
        self.too_large: set[str] = set()
        """Names whose values were given up because they grew without bound."""
        self.partly: set[str] = set()
        """Names that some ranks alone gave a value where they had none: see ``makers``."""
        self.oldest_written = NEVER
        """Smallest number of a scope or object that was written since this was set to ``NEVER``."""
        self.outside: set[int] = set()
        """Objects that come from outside of what was read: each attribute has a value before any is given."""

    def get(self, owner: int, name: str) -> Value | None:
        """Return the value of a name, None when it has none."""
        names = self.owners.get(owner)
        found = None if names is None else names.get(name)
        return BoundMethod(OPAQUE, name) if found is None and owner in self.outside else found

    def set(self, owner: int, name: str, value: Value, ranks: int = ALL_RANKS) -> None:
        """Give a name a value on the ranks of a mask; the others keep theirs."""
        if ranks != ALL_RANKS:
            old = self.get(owner, name)
            if old is not None and old != value:
                value = partly_written(value, old, ranks)
        self.write((owner, name), value)

    def names(self, owner: int) -> tuple[str, ...]:
        """Return the names in a scope or of an object's attributes, in the order of their first assignment."""
        names = tuple(self.owners.get(owner, ()))
        return tuple(name for name in names if name[:1] != _MAKERS) if self.partly else names

    def held(self, owner: int) -> list[Value]:
        """Return what the names in a scope or the attributes of an object hold."""
        return [value for name in self.names(owner) if (value := self.get(owner, name)) is not None]

    def makers(self, owner: int, name: str) -> int | None:
        """Return the mask of the ranks that gave a name a value, where it had none; None where any rank may have."""
        known = self.get(owner, _MAKERS + name) if name in self.partly else None
        return known.value if isinstance(known, Const) and isinstance(known.value, int) else None

    def note_makers(self, owner: int, name: str, ranks: int) -> None:
        """Note that the ranks of a mask give a name a value, before they do."""
        known = self.makers(owner, name)
        if known is None and (ranks == ALL_RANKS or self.get(owner, name) is not None):
            if name in self.partly and self.get(owner, _MAKERS + name) is not None:
                self.write((owner, _MAKERS + name), UNIFORM)
            return
        self.partly.add(name)
        self.write((owner, _MAKERS + name), Const(ranks | (known or 0)))

    @property
    def depth(self) -> int:
        """Number of open journals."""
        return len(self.journals)

    def begin(self) -> None:
        """Start a journal."""
        self.journals.append({})

    def undo(self) -> dict[Cell, Value]:
        """Take back everything written since ``begin``; return what was written."""
        journal, owners = self.journals.pop(), self.owners
        written: dict[Cell, Value] = {}
        for cell, old in journal.items():
            names = owners[cell[0]]
            value = names[cell[1]]
            if value is not None:
                written[cell] = value
            names[cell[1]] = old
        return written

    def latest(self) -> Mapping[Cell, Value | None]:
        """Return what the cells written since the last ``begin`` held before."""
        return self.journals[-1]

    def keep(self) -> None:
        """End a journal without taking anything back."""
        journal = self.journals.pop()
        if self.journals:
            outer = self.journals[-1]
            for cell, old in journal.items():
                outer.setdefault(cell, old)

    def put(self, written: Mapping[Cell, Value]) -> None:
        """Write values that were taken back."""
        for cell, value in written.items():
            self.write(cell, value)

    def merge(self, written: Mapping[Cell, Value], varying: bool = False) -> None:
        """Join values that a path left behind with the present ones."""
        # What has a value now, on all ranks or on those noted, had it in the first turn, whatever later ones do.
        of_now = {cell for cell in written if cell[1][:1] == _MAKERS and self.get(cell[0], cell[1][1:]) is not None}
        for cell, value in written.items():
            if cell not in of_now:
                self.write(cell, join(self.get(*cell), value, varying))

    def merge_arms(self, arms: Sequence[tuple[Mapping[Cell, Value], int]], varying: bool) -> None:
        """Join what alternative paths wrote; each comes with the mask of the ranks that reached its end."""
        if len(arms) == 1:
            self.put(arms[0][0])
            return
        alike = len({ranks for _, ranks in arms}) == 1
        for cell in dict.fromkeys(cell for written, _ in arms for cell in written):
            base = self.get(*cell)
            if cell[1][:1] == _MAKERS and any(
                (cell[0], cell[1][1:]) in written and cell not in written for written, _ in arms
            ):
                value: Value = UNIFORM  # Another arm gives the name a value on all of its ranks.
            elif alike:
                value = self._joined([written.get(cell, base) for written, _ in arms], varying)
            else:
                value = per_rank([self._joined_lane(cell, base, arms, rank, varying) for rank in RANKS])
            self.write(cell, value)

    @staticmethod
    def _joined(values: list[Value | None], varying: bool) -> Value:
        return join(reduce(partial(join, varying=varying), values), None)

    def _joined_lane(
        self, cell: Cell, base: Value | None, arms: Sequence[tuple[Mapping[Cell, Value], int]], rank: int, varying: bool
    ) -> Value:
        values = [written.get(cell, base) for written, ranks in arms if ranks >> rank & 1]
        if not values:
            values = [written.get(cell, base) for written, _ in arms]
        return self._joined([value if value is None else on_rank(value, rank) for value in values], varying)

    def write(self, cell: Cell, value: Value) -> None:
        """Give a name a value on all ranks."""
        owner, name = cell
        if is_too_large(value):
            self.too_large.add(name)
            value = derived((value,))
        if value.__class__ is PerRank:
            if all(isinstance(entry, Const) and type(entry.value) is int for entry in value.values):
                self.rank_names.add(name)
        elif value.__class__ is Unknown and value.tags and any(kind in SIZES for kind, _ in value.tags):
            self.size_names.add(name)
            (self.device_counts.add if value.tags == _DEVICES else self.device_counts.discard)(name)
        self._note(cell)
        self.owners[owner][name] = value

    def forget(self, cells: Iterable[Cell]) -> None:
        """Take the values of names away, on all ranks."""
        for cell in cells:
            self._note(cell)
            self.owners[cell[0]][cell[1]] = None

    def _note(self, cell: Cell) -> None:
        """Keep what a name held, as it is about to be written."""
        owner, name = cell
        names = self.owners.get(owner)
        if names is None:
            names = self.owners[owner] = {}
        if self.journals:
            journal = self.journals[-1]
            if cell not in journal:
                journal[cell] = names.get(name)
        if owner < self.oldest_written:
            self.oldest_written = owner


Origins: TypeAlias = "frozenset[tuple[int | str, bool, frozenset[Tag]]]"
"""Of arguments, by their places or names: whether they differ between ranks, and what they come from."""
NO_ORIGINS: Origins = frozenset()


class CallFrame:
    """One call of a project function."""

    def __init__(self, function: str, module: Module, scope: int, outer_scopes: tuple[int, ...]) -> None:
        self.function = function
        self.module = module
        self.scope = scope
        self.scopes = (scope, *outer_scopes)
        """Scopes that names are looked up in, innermost first."""
        self.globals: set[str] = set()
        self.nonlocals: set[str] = set()
        self.results: list[tuple[int, Value]] = []
        """What was returned, by mask of ranks."""
        self.left_behind: list[dict[Cell, Value]] = []
        """What paths wrote that returned early ..."""
        self.own: OwnTest | None = None
        """... by something of the rank's own, so that ranks may return other things."""
        self.skips: tuple[Skip, ...] = ()
        """The conditions of these returns, outside of loops."""
        self.on_yield: Callable[[Value], None] | None = None
        self.yielded: Value | None = None
        """What a generator gives for any of its items, unless ``on_yield`` takes them ..."""
        self.giving: list[LoopFrame] = []
        """... and the loops in which it does."""
        self.loops_outside = 0
        """Number of the loops around the call."""
        self.entry = ALL_RANKS
        """Mask of the ranks that make the call."""
        self.owner: Function | None = None
        self.call: ast.AST | None = None
        """What calls it."""
        self.origins = NO_ORIGINS
        """What the arguments of the call come from."""
        self.by_rank = False
        """A path returned early by a condition that the ranks may decide differently."""
        self.agreed: set[str] = set()
        """The variables that a collective, here or in what was called, has written the same into on every rank."""
        self.file = str(module.path)
        self.around: tuple[list[Frame], tuple[Frame, ...], tuple[int, ...]] | None = None
        """The call sites when something was last recorded here, innermost first, and the scopes of all frames."""

    @property
    def returning(self) -> int:
        """Mask of the ranks of which a path has returned; those that still run do so on another path."""
        mask = 0
        for ranks, _ in self.results:
            mask |= ranks
        return mask


class LoopFrame:
    """One loop that is being walked."""

    def __init__(self, around: LoopAround) -> None:
        self.around = around
        self.skipped = self.broken = False
        """Ranks may decide differently which turns they leave by ``break`` or ``continue``, or by ``break`` ..."""
        self.own: OwnTest | None = None
        """... by something of their own: their data, clock or random numbers."""
        self.bound: OwnTest | None = None
        """The condition of a ``while`` where it is one of the rank's own."""
        self.skips: tuple[Skip, ...] = ()
        """The conditions by which ranks left this turn for the next one."""
        self.left_behind: list[dict[Cell, Value]] = []
