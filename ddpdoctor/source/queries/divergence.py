"""Comparison of what the four ranks run: where they part, under which condition, and what each does there."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import Literal

import msgspec

from ddpdoctor.check import Check
from ddpdoctor.finding import Fact, Finding, Location, Severity
from ddpdoctor.source.events import Branch, Event, Exit, Guard, Item, Jump, Loop, Tree, events_in, same, shape_of
from ddpdoctor.source.interpreter.values import (
    ALL_RANKS,
    BAR_COUNT,
    RANKS,
    PerRank,
    SequenceValue,
    is_guessed,
    on_rank,
    tags_of,
    truth,
)
from ddpdoctor.source.projection import Projection, Walk
from ddpdoctor.source.ranks.ranks import numbers_in, ranks_text
from ddpdoctor.source.script.module import (
    DEFINITIONS,
    LEAVES,
    Module,
    all_once,
    descend,
    descend_outside,
    dotted,
    last_name,
)

SAME_ORDER = "Let the ranks make these calls in the same order."
SHOWN = 3
"""Collectives shown of what a rank runs."""


Cause = Literal["collective", "group", "wrap", "forward"]
"""What the ranks part at: making a group, building DDP, a forward through DDP, or any other collective."""


class SourceParting(msgspec.Struct, frozen=True, eq=False):
    """A place where ranks run different collectives."""

    event: Event
    """The call that only some ranks make."""
    running: int
    """Mask of the ranks that run it."""
    missing: int
    """Mask of the ranks that do not."""
    running_next: Tree
    """What the former run from here on."""
    missing_next: Tree
    guard: Guard
    """What decides: a rank test, or a function that is not the same on every rank."""
    left: Exit | None
    """Where the missing ranks left, when they left before instead of taking the other arm."""
    turns: tuple[int, int] | None = None
    """Turns of the loop around it on the running and on the missing ranks, where that is the difference."""
    instead: Event | None = None
    """What the missing ranks run first, where they make the same calls in another order."""
    made: Event | None = None
    """What made the object whose collective it is, where a setting decides that."""

    @property
    def cause(self) -> Cause:
        """What they part at."""
        return "collective" if self.instead is not None else _cause(self.event)

    @property
    def bar(self) -> int:
        """The line of the bar of tqdm by whose count they part; 0 of none."""
        return next((line for kind, line in tags_of(self.guard.value) if kind == BAR_COUNT), 0)

    @property
    def collective(self) -> str:
        """Name of the collective that only some ranks run."""
        return self.event.name

    @property
    def location(self) -> Location:
        """Where it is called."""
        return self.event.location


def partings_by(projection: Projection, cause: Cause) -> Iterator[SourceParting]:
    """Yield the places where ranks part by one cause: each check of divergences has its own."""
    return (parting for parting in partings(projection) if parting.cause == cause)


@all_once
def partings(projection: Projection) -> Iterator[SourceParting]:
    """Yield every place where ranks part, one for each collective call."""
    seen: set[ast.AST] = set()
    left: set[tuple[ast.AST, bool]] = set()
    for walk in projection.walks:
        for found in _in_walk(projection, walk):
            # Ranks that leave by one statement miss every collective behind it: only the first one is reported, and
            # behind a forward the first that remains when the forward is made through the bare model.
            exit_node = None if found.left is None else (found.left.node, _cause(found.event) == "forward")
            if found.event.node in seen or exit_node in left or (found.left is not None and found.left.node in seen):
                continue
            seen.add(found.event.node)
            if exit_node is not None:
                left.add(exit_node)
            yield _described(found, _made_by_choice(projection, found.event))
        for found in _by_caught_raise(projection, walk):
            if found.event.node not in seen:
                seen.add(found.event.node)
                yield _described(found)


def _cause(event: Event) -> Cause:
    if event.kind == "wrap":
        return "wrap"
    if event.kind == "forward":
        return "forward"
    return "group" if event.name == "new_group" else "collective"


def finding_of(check: Check, parting: SourceParting, remedy: str, title: str = "") -> Finding:
    """Return the finding for a place where ranks part; a warning where the rank test is one by its name only."""
    found = check.finding(
        title or _title(parting),
        remedy=remedy,
        locations=_places_of(parting),
        evidence=_evidence_of(parting),
        severity=Severity.WARNING if parting.guard.guessed else None,
    )
    return msgspec.structs.replace(found, disproved_at=parting.event.chain) if _is_always_so(parting) else found


def _is_always_so(parting: SourceParting) -> bool:
    """Return whether no rank that is missing ever comes to the call, by a test around it of the rank alone.

    Then ranks that meet there disprove it. They do not where a condition beside the rank may hold later, or where the
    same lines run for several objects of a list that is not as long on every rank.
    """
    guard = parting.guard
    around = guard.module.parents.get(guard.node)
    chosen = isinstance(around, (ast.For, ast.AsyncFor)) or (isinstance(around, ast.Call) and around.func is guard.node)
    lines = parting.event.lines_in(guard.module)
    statement = next((one for one in guard.module.ancestors(guard.node) if isinstance(one, ast.stmt)), None)
    if chosen or statement is None or parting.left is not None or parting.turns is not None:
        return False
    lanes = (on_rank(guard.value, rank) for rank in RANKS if parting.missing >> rank & 1)
    inside = any(statement.lineno <= line <= (statement.end_lineno or 0) for line in lines)
    return inside and all(truth(lane) is not None for lane in lanes)


def _evidence_of(parting: SourceParting) -> tuple[Fact, ...]:
    left = () if parting.left is None else (_exit_of(parting, parting.left),)
    if parting.instead is not None:
        text = f"{ranks_text(parting.missing)} {_verb(parting.missing, 'run')} {parting.instead.name} first"
        left = (Fact(text=text, basis="source", location=parting.instead.location, stack=parting.instead.chain),)
    return (
        *left,
        Fact(text=_what_decides(parting.guard, parting.bar), basis="source", location=parting.guard.location),
        Fact(
            text=f"this call chain leads {ranks_text(parting.running)} to {parting.collective}",
            basis="source",
            location=parting.location,
            stack=parting.event.chain,
        ),
        *(() if parting.made is None else (_choice(parting.made),)),
    )


def _choice(made: Event) -> Fact:
    text = f"`{made.conditions[-1]}` decides whether the model is sharded"
    return Fact(text=text, basis="source", location=made.location)


def _exit_of(parting: SourceParting, left: Exit) -> Fact:
    text = f"{ranks_text(parting.missing)} {_verb(parting.missing, 'leave')} by `{left.module.excerpt(left.node)}`"
    return Fact(text=text, basis="source", location=left.location)


def _places_of(parting: SourceParting) -> tuple[Location, ...]:
    leaving = () if parting.left is None else (parting.left.location,)
    return (parting.location, *leaving, parting.guard.location)


def remedy_of(parting: SourceParting) -> str:
    """Return what to do where ranks part at a collective."""
    if parting.instead is not None:
        return SAME_ORDER
    if parting.turns is not None:
        return f"Give the loop the same number of turns on every rank, or move {parting.collective} out of it."
    if parting.bar:
        return "Count in a variable of the script, which all ranks have: a bar that is off counts nothing."
    if parting.left is not None:
        return (
            f"Let all ranks leave together (broadcast the decision, then leave), or none before {parting.collective}."
        )
    return f"Make every rank call {parting.collective}, or none: move it out of the branch that only some ranks take."


def _title(parting: SourceParting) -> str:
    if parting.instead is not None:
        both = (parting.running, parting.collective), (parting.missing, parting.instead.name)
        (few, one), (many, other) = sorted(both, key=lambda side: side[0].bit_count())
        return f"{ranks_text(few)} {_verb(few, 'run')} {one} before {other}, {_others(many, few)} {other} before {one}"
    if parting.turns is not None:
        here, there = parting.turns
        return (
            f"{ranks_text(parting.running)} {_verb(parting.running, 'run')} {parting.collective} {here} times, "
            f"{ranks_text(parting.missing)} {there} times: the bound of the loop depends on the rank"
        )
    if parting.left is not None:
        left = parting.left.location
        place = f"line {left.line}"
        if left.file != parting.location.file:
            place += f" of {PurePath(left.file).name}"
        return (
            f"{ranks_text(parting.missing)} can leave at {place}, before {parting.collective}, "
            f"which {_others(parting.running, parting.missing)}"
        )
    rest = _others(parting.missing, parting.running)
    sides = [
        subject + (f" [{', '.join(names)}]" if names else " nothing more")
        for subject, names in (
            (f"{ranks_text(parting.running)} {_verb(parting.running, 'run')}", _names(parting.running_next)),
            (rest, _names(parting.missing_next)),
        )
    ]
    ranks = f"{ranks_text(parting.running)} {_verb(parting.running, 'reach')}"
    return f"only {ranks} {parting.collective}: " + "; ".join(sides)


def _others(mask: int, named: int) -> str:
    """Return subject and verb for the ranks beside those that were named: a job may be of two."""
    return "the others run" if mask | named == ALL_RANKS else f"{ranks_text(mask)} {_verb(mask, 'run')}"


def _verb(mask: int, verb: str) -> str:
    if len(numbers_in(mask)) > 1:
        return verb
    return verb + ("es" if verb.endswith("ch") else "s")


def _in_walk(projection: Projection, walk: Walk) -> Iterator[SourceParting]:
    classes: dict[int, tuple[int, Tree]] = {}
    for rank, tree in enumerate(walk.trees if not walk.uncertain else ()):
        if not walk.raised >> rank & 1:
            mask, first = classes.get(shape := shape_of(tree), (0, tree))
            classes[shape] = mask | 1 << rank, first
    one, *others = classes.values() or ((0, ()),)
    for other in others:
        yield from _compare(projection, one, other)


class _Side(msgspec.Struct, frozen=True):
    """One of two groups of ranks, at a place of its tree."""

    ranks: int
    item: Item | None
    rest: Tree
    """The item and what follows it, as far as that is looked at."""


def _compare(
    projection: Projection, one: tuple[int, Tree], other: tuple[int, Tree], around: tuple[Tree, Tree] = ((), ())
) -> Iterator[SourceParting]:
    """Walk two trees side by side; report a call that a rank test keeps from the other side, and step over it.

    ``around`` is the body of the loop that both stand in: ranks that leave it miss what the next turn runs.
    """
    (ranks, tree), (other_ranks, other_tree) = one, other
    here, there = 0, 0
    while here < len(tree) or there < len(other_tree):
        item = tree[here] if here < len(tree) else None
        match = other_tree[there] if there < len(other_tree) else None
        if item is not None and item is match:
            here, there = here + 1, there + 1
            continue
        rest, other_rest = tree[here : here + AHEAD], other_tree[there : there + AHEAD]
        mine, theirs = _Side(ranks, item, rest), _Side(other_ranks, match, other_rest)
        if item is not None and match is not None and same((item,), (match,)):
            extra = _extra(projection, mine, theirs)
            missed = extra or _extra(projection, theirs, mine)
            if missed is not None:
                yield missed
            here, there = here + (missed is None or extra is not None), there + (extra is None)
            continue
        longer = _other_turns(mine, theirs)
        if longer is not None:
            yield longer
            here, there = here + 1, there + 1
            continue
        inner = _inside(item, match)
        if inner is not None:
            loop = inner[0] if isinstance(item, Loop) else around
            yield from (found for a, b in inner for found in _compare(projection, (ranks, a), (other_ranks, b), loop))
            here, there = here + 1, there + 1
            continue
        found, back = _guarded(projection, mine, theirs), _guarded(projection, theirs, mine)
        if found is None and back is None:
            mine = _Side(ranks, item, _with_events(rest, tree, around[0]))
            theirs = _Side(other_ranks, match, _with_events(other_rest, other_tree, around[1]))
            left = _by_exit(projection, mine, theirs)
            if left is not None:
                yield left
                yield from _behind_forward(left)
                on, other_on = _going_on(tree[here:]), _going_on(other_tree[there:])
                if on is not None or other_on is not None:
                    ways = on or tree[here:], other_on or other_tree[there:]
                    yield from _compare(projection, (ranks, ways[0]), (other_ranks, ways[1]), around)
            return
        swapped = _swapped(rest, other_rest)
        if swapped is not None:
            taken, other_taken, first, other_first = swapped
            if found is not None:
                yield msgspec.structs.replace(found, instead=other_first)
            elif back is not None:
                yield msgspec.structs.replace(back, instead=first)
            here, there = here + taken, there + other_taken
            continue
        if found is not None:
            yield msgspec.structs.replace(found, missing_next=_with_events(other_rest, around[1]))
            here += 1
            both = back is not None and back.guard.node is found.guard.node
            there += both and not same(tree[here:], other_tree[there:])
        elif back is not None:
            yield msgspec.structs.replace(back, missing_next=_with_events(rest, around[0]))
            there += 1


def _going_on(tree: Tree) -> Tree | None:
    """Return what ranks do that did not leave by the condition that a tree begins with; None where it is none."""
    branch = tree[0] if tree else None
    if not isinstance(branch, Branch):
        return None
    going = [arm for arm in branch.arms if next(events_in(arm), None) is not None]
    return (*going[0], *tree[1:]) if len(going) == 1 else None


def _swapped(rest: Tree, other_rest: Tree) -> tuple[int, int, Event, Event] | None:
    """Return how many items of each side are the same calls in another order, and with which each begins; else None.

    Where a condition decides as well, as the number of the step does, one of its arms may hold them.
    """
    for way in _ways(rest):
        for other_way in _ways(other_rest):
            length = _permuted(way[0], other_way[0])
            taken, other_taken = length + way[1], length + other_way[1]
            if length and taken > 0 and other_taken > 0:
                first, other_first = way[0][0], other_way[0][0]
                if isinstance(first, Event) and isinstance(other_first, Event):
                    return taken, other_taken, first, other_first
    return None


def _ways(tree: Tree) -> Iterator[tuple[Tree, int]]:
    """Yield the ways through the first condition of a tree, and how many items more the tree has than each of them."""
    if tree and isinstance(tree[0], Branch):
        for arm in tree[0].arms:
            yield (*arm, *tree[1:]), 1 - len(arm)
    else:
        yield tree, 0


def _permuted(one: Tree, other: Tree) -> int:
    """Return how many of the next calls are the same ones on both sides, in another order; 0 where they are not."""
    ahead: Counter[str] = Counter()
    for number, (item, match) in enumerate(zip(one, other, strict=False), 1):
        if not isinstance(item, Event) or not isinstance(match, Event):
            return 0
        ahead[item.name] += 1
        ahead[match.name] -= 1
        if not any(ahead.values()):
            return number if number > 1 else 0
    return 0


def _extra(projection: Projection, one: _Side, other: _Side) -> SourceParting | None:
    """Return a call of one side that the other only seems to match, by one that this side makes as well, later on."""
    event, match = one.item, other.item
    if not isinstance(event, Event) or not isinstance(match, Event) or event.ordinal == match.ordinal:
        return None
    if not any(isinstance(later, Event) and later.ordinal == match.ordinal for later in one.rest[1:]):
        return None
    return _guarded(projection, one, other) or _by_exit(projection, one, _Side(other.ranks, None, ()))


def _with_events(*trees: Tree) -> Tree:
    """Return the first of some trees in which something happens."""
    return next((tree for tree in trees if next(events_in(tree), None) is not None), trees[0])


def _other_turns(one: _Side, other: _Side) -> SourceParting | None:
    """Return a loop that both sides run, with the same collectives, a different number of times."""
    item, match = one.item, other.item
    if not isinstance(item, Loop) or not isinstance(match, Loop) or item.node is not match.node:
        return None
    if item.turns is None or match.turns is None or item.turns == match.turns or not same(item.body, match.body):
        return None
    event = next(events_in(item.body), None)
    around = next((loop for loop in event.loops if loop.node is item.node), None) if event is not None else None
    if event is None or around is None:
        return None
    bound = getattr(around.node, "iter", around.node)
    guard = Guard(bound, around.module, one.ranks, is_guessed(around.iterable), around.iterable, 0)
    turns = item.turns, match.turns
    return SourceParting(event, one.ranks, other.ranks, one.rest, other.rest, guard, None, turns)


def _inside(item: Item | None, match: Item | None) -> list[tuple[Tree, Tree]] | None:
    if isinstance(item, Branch) and isinstance(match, Branch) and len(item.arms) == len(match.arms):
        return list(zip(item.arms, match.arms, strict=True))
    if isinstance(item, Loop) and isinstance(match, Loop) and item.turns == match.turns:
        return [(item.body, match.body)]
    return None


def _guarded(projection: Projection, one: _Side, other: _Side) -> SourceParting | None:
    """Return a call in the item of one side that a rank test keeps from all the other ranks."""
    for event in events_in((one.item,)) if one.item is not None else ():
        for guard in reversed(event.guards):
            if not guard.arm & other.ranks and not _made_elsewhere(projection, event, guard, other.ranks):
                return SourceParting(event, one.ranks, other.ranks, one.rest, other.rest, guard, None)
    return None


def _made_elsewhere(projection: Projection, event: Event, guard: Guard, others: int) -> bool:
    """Return whether the other ranks come to the same call by another way: something that is made at its first use."""
    if event.kind != "wrap" and len(event.conditions) <= guard.conditions:
        return False
    return any(
        other is not event and other.node is event.node and other.ranks & others == others
        for other in projection.events
    )


def _by_exit(projection: Projection, one: _Side, other: _Side) -> SourceParting | None:
    """Return a call that one side misses because it left a function, a loop or the program under a rank test."""
    for here, there in ((one, other), (other, one)):
        event = next(events_in(here.rest), None)
        item, match = here.item, there.item
        for left in reversed(projection.exits) if event is not None else ():
            if event is None or not left.ranks & there.ranks or left.ranks & here.ranks:
                continue
            if (left.scope and left.scope not in event.scopes) or _excludes(left, event) or _comes_after(left, event):
                continue
            before = item is not None and left.ordinal < event.ordinal
            leaves = isinstance(match, Jump) or (isinstance(match, Branch) and match.leaves)
            if before or leaves or (isinstance(item, Loop) and _stands_in(left.node, item.node)):
                return SourceParting(event, here.ranks, there.ranks, here.rest, there.rest, left.guard, left)
    return None


def _behind_forward(found: SourceParting) -> Iterator[SourceParting]:
    """Yield the first explicit collective that follows a missed forward in the function that some ranks left."""
    left = found.left
    if left is None or not left.scope or _cause(found.event) != "forward":
        return
    for event in events_in(found.running_next):
        if event.kind == "collective" and left.scope in event.scopes:
            yield msgspec.structs.replace(found, event=event)
            return


def _comes_after(left: Exit, event: Event) -> bool:
    """Return whether ranks leave a function only after the call, with no loop in it that would bring them back."""
    behind = left.scope != 0 and left.ordinal > event.ordinal
    return behind and not any(_stands_in(left.node, loop.node) for loop in event.loops)


def _excludes(left: Exit, event: Event) -> bool:
    """Return whether a switch of the function that was left is off on the way to the exit and on at the call.

    ``if not args.all: if rank: return`` keeps no rank from the call in ``if args.all: gather()`` further down.
    """
    at_exit = dict(_switches(left, getattr(left.node, "lineno", 0)))
    undecided = {_switch(test)[0] for _, test in event.undecided}
    return any(
        name in undecided and at_exit.get(name, is_on) is not is_on
        for line in event.lines_in(left.module)
        for name, is_on in _switches(left, line)
    )


def _switches(left: Exit, line: int) -> Iterator[tuple[str, bool]]:
    """Yield the names that the function which was left tests around a line, and whether they are true there."""
    for around in left.module.index.within(left.module.body_around(left.node), ast.If):
        name, is_on = _switch(around.test)
        for arm, value in ((around.body, is_on), (around.orelse, not is_on)):
            if name and arm and arm[0].lineno <= line <= (arm[-1].end_lineno or 0):
                yield name, value


def _switch(test: ast.AST) -> tuple[str, bool]:
    """Return the variable or attribute that a condition tests, and its value where the condition holds."""
    is_on = True
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, is_on = test.operand, not is_on
    return dotted(test), is_on


def _by_caught_raise(projection: Projection, walk: Walk) -> Iterator[SourceParting]:
    """Yield a call in a ``try`` that one side misses after it raised under a rank test and went on in a handler."""
    for left in projection.exits:
        if not isinstance(left.node, ast.Raise) or left.ranks == ALL_RANKS:
            continue
        around = _try_around(left)
        if around is None or all(isinstance(handler.body[-1], ast.Raise) for handler in around.handlers):
            continue
        last = around.body[-1].end_lineno or left.node.lineno
        handled = around.end_lineno or last
        events = {event.ordinal: event for tree in walk.trees for event in events_in(tree)}
        missed = list(events_through(events.values(), left.module, left.node.lineno + 1, last))
        instead = {event.name for event in events_through(events.values(), left.module, last + 1, handled)}
        if missed and not instead & {event.name for event in missed}:
            event = min(missed, key=lambda event: event.ordinal)
            yield SourceParting(event, ALL_RANKS & ~left.ranks, left.ranks, (event,), (), left.guard, left)


def _try_around(left: Exit) -> ast.Try | None:
    line = getattr(left.node, "lineno", 0)
    for around in left.module.in_function(left.node):
        if isinstance(around, ast.Try) and around.handlers and line <= (around.body[-1].end_lineno or 0):
            return around
    return None


def _stands_in(node: ast.AST, around: ast.AST | None) -> bool:
    return around is not None and any(inner is node for inner in descend(around))


def _made_by_choice(projection: Projection, event: Event) -> Event | None:
    made = projection.machine.object(event.receiver) if event.receiver is not None else None
    return made if made is not None and made.conditions and event.kind == "collective" else None


def _described(found: SourceParting, made: Event | None = None) -> SourceParting:
    if found.left is not None or found.turns is not None or found.instead is not None:
        return msgspec.structs.replace(found, made=made)
    ranks = found.event.ranks  # Other ways than this one may lead more of them there.
    return msgspec.structs.replace(found, running=ranks, missing=ALL_RANKS & ~ranks, made=made)


def _what_decides(guard: Guard, bar: int) -> str:
    around = guard.module.parents.get(guard.node)
    chosen = isinstance(around, ast.Call) and around.func is guard.node
    how = "is not the same function on every rank" if chosen else "decides"
    of_lists = isinstance(guard.value, PerRank) and isinstance(guard.value.values[0], SequenceValue)
    if of_lists and isinstance(around, ast.For) and around.iter is guard.node:
        how = "does not hold as many on every rank"
    of_bar = f", by a bar of tqdm that only some ranks have on (line {bar})" if bar else ""
    return f"`{guard.module.excerpt(guard.node)}` {how}{of_bar}"


def _names(tree: Tree) -> tuple[str, ...]:
    names: list[str] = []
    for event in events_in(tree):
        names.append(event.name)
        if len(names) > SHOWN:
            return (*names[:SHOWN], "...")
    return tuple(names)


AHEAD = 200
"""Items of a tree that are looked at to tell what one side has done that the other does later: 50,000 took 9 s."""


# The collectives of a script that every rank has to come to, and the lines that lead to them.

BARRIERS = frozenset({"barrier", "monitored_barrier", "wait_for_everyone"})
_CLOSED = DEFINITIONS | LEAVES | {ast.Lambda}


def is_in_turns(projection: Projection, event: Event) -> bool:
    """Return whether some ranks wait before an event and the others behind it, so that these go first.

    ``if rank != 0: barrier()``, what they do, ``if rank == 0: barrier()``.
    """
    waits = [one for one in projection.of_kind("collective") if one.name in BARRIERS and one.ranks != ALL_RANKS]
    before: Event | None = None
    for wait in waits:
        if before is None or before.ranks ^ wait.ranks != ALL_RANKS:
            before = wait
        elif before.ordinal < event.ordinal < wait.ordinal:
            return True
        else:
            before = None
    return False


def events_through(events: Iterable[Event], module: Module, first_line: int, last_line: int) -> Iterator[Event]:
    """Yield the events whose call chain passes some lines of a file."""
    return (event for event in events if any(first_line <= line <= last_line for line in event.lines_in(module)))


def reported_lines(projection: Projection) -> frozenset[tuple[str, int]]:
    """Return the file and line of the collectives that a rank test keeps from some ranks; other checks skip them."""
    return frozenset((parting.location.file, parting.location.line) for parting in partings(projection))


def guard_of(projection: Projection, event: Event) -> Guard | None:
    """Return the condition that keeps the other ranks out: around a call, or one under which they left before it."""
    if event.guards:
        return event.guards[-1]
    for left in reversed(projection.exits):
        passed = left.ordinal < event.ordinal and (not left.scope or left.scope in event.scopes)
        if passed and left.ranks == ALL_RANKS & ~event.ranks:
            return left.guard
    return None


def function_around(module: Module, node: ast.AST) -> ast.AST:
    """Return the function that a node stands in, or the module."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    return next((around for around in module.ancestors(node) if isinstance(around, functions)), module.tree)


def nodes_of(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of functions and classes in it."""
    return descend_outside(function, _CLOSED)


def mentions(node: ast.AST, names: Iterable[str]) -> bool:
    """Return whether an expression holds one of some variables or dotted attributes."""
    wanted = names if isinstance(names, (set, frozenset)) else set(names)
    last = {name.rpartition(".")[2] for name in wanted}
    return any(last_name(inner) in last and ast.unparse(inner) in wanted for inner in descend(node))


def stores(node: ast.AST, name: str) -> bool:
    """Return whether a node is a variable or attribute of this name that is assigned."""
    return (
        isinstance(node, (ast.Name, ast.Attribute))
        and isinstance(node.ctx, ast.Store)
        and last_name(node) == name.rpartition(".")[2]
        and ast.unparse(node) == name
    )
