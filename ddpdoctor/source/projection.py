"""Runs a script on four imagined ranks and keeps what each of them did."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TypeAlias

import msgspec

from ddpdoctor.files import regex
from ddpdoctor.source.events import Event, EventKind, Exit, Item, Tree, events_in, settle
from ddpdoctor.source.interpreter.attributes import bound_to, class_attribute
from ddpdoctor.source.interpreter.calls import apply, call_function, construct
from ddpdoctor.source.interpreter.expressions import evaluate
from ddpdoctor.source.interpreter.imports import run_module
from ddpdoctor.source.interpreter.scopes import CallFrame
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.statements import execute
from ddpdoctor.source.interpreter.values import (
    ALL_RANKS,
    MAXIMUM_WEIGHT,
    OPEN_ARGUMENTS,
    Function,
    Instance,
    ProjectClass,
)
from ddpdoctor.source.ranks.rank_local_values import mark_decided, own_test
from ddpdoctor.source.script.module import Module, deep_recursion, once, once_each
from ddpdoctor.source.script.script import Script, note_gap

_MAIN_NAMES = regex(r"_?(main|train|run|worker|demo|fit|finetune|pretrain)(_|$)")


class Walk(msgspec.Struct, frozen=True, eq=False):
    """What the ranks did from one starting point."""

    trees: tuple[Tree, ...]
    """One a rank; a rank that raised has what it did until then."""
    raised: int
    """Mask of the ranks that ended by an exception."""
    uncertain: bool = False
    """Something that only some ranks do was not followed, here or before: a difference of the trees proves nothing."""


class Projection(msgspec.Struct, frozen=True, dict=True, eq=False):
    """A script as four ranks run it."""

    machine: Machine
    events: tuple[Event, ...]
    """In the order of execution."""
    exits: tuple[Exit, ...]
    walks: tuple[Walk, ...]
    """From the top of the entry script, then from functions that nothing read calls."""
    bound: str = ""
    """What was not followed because a bound was reached, in a sentence; empty when everything was."""

    def of_kind(self, *kinds: EventKind) -> Iterator[Event]:
        """Yield events of some kinds that happen in ranks, in the order of execution."""
        return iter(self._of(kinds))

    def in_course(self, *kinds: EventKind) -> Iterator[Event]:
        """Yield events of some kinds in ranks that the script itself comes to, or a function that wraps a model."""
        return iter(self._in_course(kinds))

    @once_each
    def _in_course(self, kinds: tuple[EventKind, ...]) -> Sequence[Event]:
        return [event for event in self._of(kinds) if not event.root or event.root in self._training_roots]

    @once_each
    def _of(self, kinds: tuple[EventKind, ...]) -> Sequence[Event]:
        if len(kinds) == 1:
            return self._by_kind.get(kinds[0], ())
        found = (event for kind in kinds for event in self._by_kind.get(kind, ()))
        return sorted(found, key=lambda event: event.ordinal)

    @cached_property
    def synchronising(self) -> tuple[Event, ...]:
        """Everything in the script that synchronises the ranks, once each, in the order of execution."""
        trees = (tree for walk in self.walks for tree in walk.trees)
        found = {event.ordinal: event for tree in trees for event in events_in(tree)}
        return tuple(found[ordinal] for ordinal in sorted(found))

    @cached_property
    def _training_roots(self) -> frozenset[str]:
        """The functions that nothing read calls and that wrap a model, or are named as a main one."""
        functions = {one.name for one in self.machine.script.entry.tree.body if isinstance(one, ast.FunctionDef)}
        wrapping = {event.root for event in self.events if event.kind == "wrap"} & functions
        return frozenset({event.root for event in self.events if _MAIN_NAMES.match(event.root)} | wrapping)

    @cached_property
    def _by_kind(self) -> Mapping[EventKind, Sequence[Event]]:
        found: dict[EventKind, list[Event]] = {}
        for event in self.events:
            if not event.in_parent:
                found.setdefault(event.kind, []).append(event)
        return found


def whole_projection(script: Script) -> Projection:
    """Walk a script for a check that has to know all of it; note what was not followed as a gap of its answer."""
    projection = project(script)
    if projection.bound:
        note_gap(script, projection.bound)
    return projection


@once
def project(script: Script) -> Projection:
    """Walk a script; the result is kept with the script. Never raises for what a script contains.

    ``init_process_group`` fails where there is a group. So where the script comes to it, there was none before, and a
    script that asked for one until then is walked again with that answer.
    """
    projection = _projected(script, group_is_made_here=False)
    made = next((one for one in projection.of_kind("collective") if one.name == "init_process_group"), None)
    if made is None or not projection.machine.asked_early or made.root or made.ranks != ALL_RANKS:
        return projection
    if any("initialized" in condition for condition in made.conditions):
        return projection
    return _projected(script, group_is_made_here=True)


def _projected(script: Script, *, group_is_made_here: bool) -> Projection:
    machine = Machine(script)
    machine.group_is_made_here = group_is_made_here
    for function in (evaluate, execute, apply, call_function, own_test):
        setattr(machine, function.__name__, partial(function, machine))
    machine.mark_decided = mark_decided
    walks: list[Walk] = []
    try:
        with deep_recursion():
            walks.append(_walk(machine, partial(run_module, machine, script.entry)))
            for root in _uncalled(machine, script.entry):
                walks.append(_walk(machine, partial(_call_root, machine, script.entry, root)))
    except RecursionError:
        machine.effort.cut[script.entry.tree] = f"code that is nested too deeply ({script.path})"
    events = tuple(machine.events[number] for number in sorted(machine.events))
    return Projection(machine, events, tuple(machine.exits), tuple(walks), "; ".join(_bounds(machine)))


def _bounds(machine: Machine) -> Iterator[str]:
    if functions := machine.effort.cut_functions():
        yield f"the script is too long to be followed at every call: {functions} is inconclusive"
    if names := sorted(machine.store.too_large):
        yield f"the value of {', '.join(names[:3])} has more than {MAXIMUM_WEIGHT:,} parts, and was not followed"


def _walk(machine: Machine, run: Callable[[], None]) -> Walk:
    machine.mask, machine.gone, machine.raised = ALL_RANKS, 0, 0
    trees: list[Tree] = []
    previous: list[Item] | None = None
    for items in machine.collect(run):
        trees.append(trees[-1] if items == previous else settle(items) or ())
        previous = items
    return Walk(tuple(trees), machine.raised, machine.uncertain)


_Root: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _uncalled(machine: Machine, entry: Module) -> Iterable[_Root]:
    """Yield top-level functions and classes of the entry that nothing calls: an interface, or run by a framework.

    Nothing but code that only they lead to mentions them. An attribute of that name is another object's: the entry is
    no module that others have by its name.
    """
    mentions = _mentions(entry)
    cycles = _cycles(mentions)
    for statement in entry.tree.body:
        if not isinstance(statement, _Root) or statement in machine.visited:
            continue
        if {cycles[place] for place in mentions.get(statement.name, ())} <= {cycles.get(statement.name)}:
            yield statement


def _cycles(places: Mapping[str, set[str]]) -> Mapping[str, int]:
    """Return a number for each definition, the same for those that lead to one another.

    By two walks, to what mentions a definition and, in the order in which those end, back: following each definition by
    itself took more than a minute for 50,000 functions of which each calls the one before.
    """
    inside: dict[str, set[str]] = {}
    for name, around in places.items():
        for place in around:
            inside.setdefault(place, set()).add(name)
    ended: list[str] = []
    seen: set[str] = set()
    for start in (*places, *inside):
        path = [(start, iter(places.get(start, ())))] if start not in seen else []
        seen.add(start)
        while path:
            following = next((name for name in path[-1][1] if name not in seen), None)
            if following is None:
                ended.append(path.pop()[0])
            else:
                seen.add(following)
                path.append((following, iter(places.get(following, ()))))
    found: dict[str, int] = {}
    for number, start in enumerate(reversed(ended)):
        waiting = [start]
        while waiting:
            name = waiting.pop()
            if name not in found:
                found[name] = number
                waiting.extend(one for one in inside.get(name, ()) if one not in found)
    return found


def _mentions(entry: Module) -> Mapping[str, set[str]]:
    """Return in which top-level definitions each of them is mentioned; an empty name stands for outside of all."""
    index = entry.index
    defined = {node.name for node in entry.tree.body if isinstance(node, _Root)}
    found: dict[str, set[str]] = {}
    for place, node in zip(index.places(ast.Name), index.of(ast.Name), strict=True):
        if node.id in defined and isinstance(node.ctx, ast.Load):
            around = index.definitions[place]
            while around >= 0 and index.outer_definitions[around] >= 0:
                around = index.outer_definitions[around]
            found.setdefault(node.id, set()).add(getattr(index.nodes[around], "name", "") if around >= 0 else "")
    return found


def _call_root(machine: Machine, entry: Module, root: _Root) -> None:
    scope = machine.scope_modules[entry.name]
    value = machine.store.get(scope, root.name)
    machine.in_parent, machine.root = False, root.name
    machine.frames.append(CallFrame("", entry, scope, ()))
    try:
        if not isinstance(root, ast.ClassDef):
            if isinstance(value, Function):
                apply(machine, root, value, OPEN_ARGUMENTS)
            return
        if isinstance(value, ProjectClass):
            instance = construct(machine, root, value, OPEN_ARGUMENTS)
            methods = (one for one in value.node.body if isinstance(one, ast.FunctionDef))
            for method in (one for one in methods if not one.name.startswith("__")):
                found = class_attribute(machine, value, method.name)
                if method not in machine.visited and isinstance(found, Function) and isinstance(instance, Instance):
                    machine.mask = ALL_RANKS & ~machine.gone
                    apply(machine, method, bound_to(found, instance), OPEN_ARGUMENTS)
    finally:
        machine.root = ""
        machine.frames.pop()
