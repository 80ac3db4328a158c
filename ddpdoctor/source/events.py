"""What ranks do, as trees: collectives, branches that cannot be decided, loops, and exits."""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice, takewhile
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from ddpdoctor.finding import Frame, Location
from ddpdoctor.source.interpreter.values import ALL_RANKS, NONE, Value
from ddpdoctor.source.script.module import Module

EventKind = Literal[
    "collective", "backward", "forward", "wrap", "loader", "sampler", "set-epoch", "attribute", "save", "device",
    "data-parallel", "object", "call", "training", "ddp-forward", "division",
]  # fmt: skip


Condition: TypeAlias = "tuple[Module, ast.AST]"
LONGEST_CONDITION = 1_000
"""Characters of a condition that are compared and searched."""
_EVENTS_LOOKED_AT = 20
"""Of an arm: what it would cost to look at all of them grows with the square of early returns."""


class Placed(msgspec.Struct, frozen=True, eq=False):
    """Something that a node of a module does."""

    node: ast.AST
    module: Module

    @property
    def location(self) -> Location:
        """Where the node is."""
        return self.module.location(self.node)


class Guard(Placed, frozen=True, eq=False):
    """One arm of a condition, its node, that the ranks decide differently."""

    arm: int
    """Mask of the ranks that take this arm."""
    guessed: bool
    """The condition is a rank test by its name only."""
    value: Value
    """What the condition is on each rank."""
    conditions: int
    """How many undecided conditions are around it."""


class LoopAround(Placed, frozen=True, eq=False):
    """A loop that something happens in."""

    iterable: Value
    once: bool
    """It makes at most one turn."""
    whole: Value = NONE
    """What it goes over, without what counts, sorts or shows it: the data set of ``enumerate(tqdm(images))``."""


class ContextAround(msgspec.Struct, frozen=True, eq=False):
    """A context manager that something happens in."""

    node: ast.expr
    """The expression of the ``with`` item."""
    module: Module
    value: Value


class Skip(NamedTuple):
    """A condition by which a rank of its own accord goes on with the next turn, or returns to where it meets the others
    again.
    """

    module: Module
    test: ast.AST
    value: Value
    holds: bool = True
    """For the ranks that leave."""


class Event(Placed, frozen=True, eq=False, kw_only=True):
    """An action of ranks that a check may look at."""

    ordinal: int
    """Position in the order of execution; also the number of the object that it constructs."""
    kind: EventKind
    name: str
    """Full name of what is called; of a collective its short name."""
    function: str
    """Qualified name of the function around the call."""
    chain: tuple[Frame, ...] = ()
    """Lines of the call chain, innermost first."""
    ranks: int = 0
    """Mask of the ranks that come here."""
    guards: tuple[Guard, ...] = ()
    """Rank tests around it, outermost first."""
    undecided: tuple[Condition, ...] = ()
    """The conditions around it that could not be decided, outermost first."""
    loops: tuple[LoopAround, ...] = ()
    """Loops around it in all frames, outermost first."""
    positional: tuple[Value, ...] = ()
    named: Mapping[str, Value] = {}
    complete: bool = True
    """All arguments are known by position or name (no ``*`` or ``**`` of unknown content)."""
    receiver: Value | None = None
    gradients: bool = True
    scopes: tuple[int, ...] = ()
    """The calls that it happens in, by the numbers of their scopes."""
    root: str = ""
    """The function that the walk started from though nothing read calls it; empty in the script's own course."""
    contexts: tuple[ContextAround, ...] = ()
    """Context managers around it in all frames, outermost first."""
    in_parent: bool = False
    """It happens in the process that spawns the ranks, not in a rank."""
    rank_tested: bool = False
    """The number of the rank decides one of the undecided conditions around it: ``rank != settings.main``."""
    deciding: tuple[Value, ...] = ()
    """What the undecided conditions around it are on the ranks that come here, outermost first."""
    skips: tuple[Skip, ...] = ()
    """What was asked before it in this turn of a loop, or in this call, by ranks of which some then left that."""

    @property
    def conditions(self) -> tuple[str, ...]:
        """The source of the conditions around it that could not be decided."""
        return tuple(module.excerpt(test, LONGEST_CONDITION) for module, test in self.undecided)

    @property
    def values(self) -> list[Value]:
        """All arguments, whatever their place or name."""
        return [*self.positional, *self.named.values()]

    def argument(self, name: str, position: int = -1) -> Value | None:
        """Return the value of an argument by its name or its position."""
        if name in self.named:
            return self.named[name]
        return self.positional[position] if 0 <= position < len(self.positional) else None

    def lines_in(self, module: Module) -> list[int]:
        """Return the lines of a file that its call chain passes, innermost first."""
        return [frame.line for frame in self.chain if frame.file == str(module.path)]


class Exit(Placed, frozen=True, eq=False):
    """Where a rank left a function, a loop or the program under a rank test."""

    ordinal: int
    guard: Guard
    ranks: int
    scope: int
    """The call that was left, or in which a loop was left; 0 for the program."""


OwnKind = Literal["batch", "clock", "files", "polled", "random", "store", "state", "order", "guard", "turns", "reduced"]
"""What differs by rank in what a condition depends on."""


class OwnTest(Placed, frozen=True, eq=False):
    """A condition, or what a loop goes over, that every rank decides by something of its own."""

    kind: OwnKind
    chain: tuple[Frame, ...]
    """Lines of the call chain, innermost first."""


class Part(Placed, frozen=True, eq=False):
    """A place where each rank takes a part of some data."""

    with_rest: bool = False
    """The last rank gets another number of items than the others."""
    items: int | None = None
    """Number of items that are divided; None where the source does not show it."""
    orders: frozenset[int] = frozenset()
    """Numbers of the draws that have put the items in order before."""


class Statistic(Placed, frozen=True, eq=False):
    """Where a rank makes one number, or a few, of many samples of its own."""

    loops: frozenset[ast.AST]
    """The loops around it."""
    carried: frozenset[ast.AST]
    """Those of them in whose next turn a variable still holds it."""
    of_pass: bool
    """One of the latter goes over the batches of a loader."""


class Branch(msgspec.Struct, frozen=True, eq=False):
    """Alternatives of which a condition, the same on all ranks, takes one."""

    arms: tuple[Tree, ...]
    shape: int = 0
    """Equal for branches that run the same; 0 while exits are not worked in."""
    leaves: bool = False
    """A jump is in one of its arms."""
    test: OwnTest | None = None
    """The condition, when ranks may take different arms."""


class Loop(msgspec.Struct, frozen=True, eq=False):
    """A body that is repeated."""

    body: Tree
    turns: int | None = None
    """Number of turns, where ranks differ in it."""
    node: ast.AST | None = None
    """The statement."""
    shape: int = 0
    """Equal for loops that run the same; 0 while exits are not worked in."""
    test: OwnTest | None = None
    """What bounds it, when ranks may make different numbers of turns."""


class Jump(msgspec.Struct, frozen=True):
    """An exit whose meaning depends on what is around it."""

    kind: Literal["return", "break", "continue", "raise", "exit"]


Item: TypeAlias = "Event | Branch | Loop | Jump"
Tree: TypeAlias = "tuple[Item, ...]"
BREAK = Jump("break")


def settle(items: Sequence[Item], rest: Tree = (), in_loop: bool = False) -> Tree | None:
    """Return what a rank runs from here on, with exits worked in; ``rest`` is what follows.

    None when every path raises. Branches with equal arms are no branches.
    """
    result: Tree | None = rest
    before: list[Item] = []  # What comes before ``result``, last first: adding to a tuple would copy it each time.
    for item in reversed(items):
        if isinstance(item, Event) or (not isinstance(item, Jump) and item.shape and not _leaves((item,))):
            before.append(item)
        elif isinstance(item, Branch) and not item.leaves:
            arms = [settle(arm, (), in_loop) or () for arm in item.arms]
            before.extend(reversed(_one_of(arms, item.test)))
        else:
            if result is not None and before:
                result = (*reversed(before), *result)
            before.clear()
            if isinstance(item, Jump):
                result = _after_jump(item, in_loop)
            elif isinstance(item, Branch):
                result = _settle_leaving(item, result, in_loop)
            else:
                result = _settle_loop(item, result)
    return None if result is None else (*reversed(before), *result)


def branch_of(arms: Sequence[Sequence[Item]], test: OwnTest | None = None) -> Branch:
    """Return a branch whose exits are still to be worked in."""
    return Branch(tuple(map(tuple, arms)), leaves=any(map(_leaves, arms)), test=test)


def before_jumps(items: Sequence[Item], last: Sequence[Item], in_loop: bool = False) -> list[Item]:
    """Return what a rank runs that runs ``last`` before each jump that leaves; those in a loop may stay in it."""
    result: list[Item] = []
    for item in items:
        if isinstance(item, Jump):
            stays = in_loop and item.kind in ("break", "continue")
            return [*result, *(() if stays else last), item]
        if isinstance(item, Branch) and item.leaves:
            item = branch_of([before_jumps(arm, last, in_loop) for arm in item.arms], item.test)
        elif isinstance(item, Loop) and not item.shape:
            item = msgspec.structs.replace(item, body=tuple(before_jumps(item.body, last, True)))
        result.append(item)
    return result


def shape_of(tree: Tree) -> int:
    """Return a number that is equal for trees which run the same kinds of collectives in the same order."""
    # An event's name stands for it: of 50,000 collectives in a row this is asked 8 times.
    return hash(tuple([item.name if isinstance(item, Event) else _shape(item) for item in tree]))


def same(one: Tree, other: Tree) -> bool:
    """Return whether two trees with exits worked in run the same kinds of collectives in the same order."""
    if len(one) != len(other):
        return False
    return all(map(operator.is_, one, other)) or shape_of(one) == shape_of(other)


def events_in(tree: Tree) -> Iterator[Event]:
    """Yield the events of a tree in order; parts that alternatives share come once.

    Every early return nests what follows one level deeper, so the levels are a list of iterators: generators in each
    other would hand each event up through all of them.
    """
    seen: set[int] = set()
    levels = [iter(tree)]
    while levels:
        item = next(levels[-1], None)
        if item is None:
            levels.pop()
        elif isinstance(item, Event):
            yield item
        elif isinstance(item, (Branch, Loop)) and id(item) not in seen:
            seen.add(id(item))
            parts = item.arms if isinstance(item, Branch) else (item.body,)
            levels.append(chain.from_iterable(parts))


def _shape(item: Branch | Loop | Jump) -> int:
    return hash(("jump", item.kind)) if isinstance(item, Jump) else item.shape


def _after_jump(jump: Jump, in_loop: bool) -> Tree | None:
    if jump.kind == "raise":
        return None
    if jump.kind == "exit":  # Nothing follows it in any function that called.
        return (jump,)
    if jump.kind == "continue" or not in_loop:
        return ()
    return (jump,)


def _settle_leaving(branch: Branch, rest: Tree | None, in_loop: bool) -> Tree | None:
    ended: Tree = () if rest is not None else (Jump("raise"),)
    arms = [settle((*arm, *ended), rest or (), in_loop) for arm in branch.arms]
    living = [arm for arm in arms if arm is not None]
    return _one_of(living, branch.test) if living else None


def _one_of(arms: Sequence[Tree], test: OwnTest | None) -> Tree:
    shapes = [shape_of(arm) for arm in arms]
    if len(set(shapes)) == 1:  # Of arms that do the same, the one that other ranks have no part in says more.
        return max(arms, key=_has_lone_event)
    leaves = any(_leaves(arm) for arm in arms)
    if leaves:  # What each of them runs first is run in any case.
        first = [items[0] for items in takewhile(_is_one_event, zip(*arms, strict=False))]
        if first:
            return (*first, *_one_of([arm[len(first) :] for arm in arms], test))
    return (Branch(tuple(arms), hash(("branch", *shapes)), leaves, test),)


def _is_one_event(items: Sequence[Item]) -> bool:
    names = {item.name for item in items if isinstance(item, Event)}
    return len(names) == 1 and all(isinstance(item, Event) for item in items)


def _has_lone_event(arm: Tree) -> bool:
    return any(event.ranks != ALL_RANKS for event in islice(events_in(arm), _EVENTS_LOOKED_AT))


def _leaves(items: Sequence[Item]) -> bool:
    return any(isinstance(item, Jump) or (isinstance(item, Branch) and item.leaves) for item in items)


def _settle_loop(loop: Loop, rest: Tree | None) -> Tree | None:
    if loop.shape:
        return None if rest is None else (loop, *rest)
    body = settle(loop.body, (), in_loop=True)
    if body is None:
        return rest
    if rest is None:
        if not _jumps(body, "return", "exit"):
            return None
        rest = ()  # What raises behind the loop is not reached from a turn that returns.
    if not rest:
        body = _return_breaks(body)
    if body and isinstance(body[-1], Jump):
        if body[-1].kind == "exit":
            return body
        return body[:-1] if body[-1].kind == "return" else (*body[:-1], *rest)
    if next(events_in(body), None) is None and not (rest and _jumps(body, "return")) and not _jumps(body, "exit"):
        return rest
    return (Loop(body, loop.turns, loop.node, hash(("loop", loop.turns, shape_of(body))), loop.test), *rest)


def _return_breaks(tree: Tree) -> Tree:
    result: list[Item] = []
    for item in tree:
        if isinstance(item, Jump) and item.kind == "return":
            result.append(BREAK)
        elif isinstance(item, Branch) and item.leaves:
            result.extend(_one_of([_return_breaks(arm) for arm in item.arms], item.test))
        else:
            result.append(item)
    return tuple(result)


def _jumps(tree: Tree, *kinds: str) -> bool:
    return any(
        (isinstance(item, Jump) and item.kind in kinds)
        or (isinstance(item, Branch) and item.leaves and any(_jumps(arm, *kinds) for arm in item.arms))
        for item in tree
    )


Sinks = list[list[Item]]
"""What each rank did so far."""


def wider(previous: Event, event: Event) -> Event:
    """Return the event with the ranks of a previous one added."""
    return msgspec.structs.replace(event, ranks=previous.ranks | event.ranks)


def ended_by(sinks: Sequence[Sequence[object]], *kinds: str) -> int:
    """Return the mask of the ranks whose last item is a jump of some kinds."""
    last = enumerate(sink[-1] if sink else None for sink in sinks)
    return sum(1 << rank for rank, item in last if isinstance(item, Jump) and item.kind in kinds)
