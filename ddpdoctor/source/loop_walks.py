"""The first walk of a loop's body, which shows what its next turns may find changed."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

from ddpdoctor.source.machine import Machine, Sinks
from ddpdoctor.source.store import Cell
from ddpdoctor.source.values import Value, join


def first_walk(machine: Machine, loop: ast.AST, turn: Callable[[], None]) -> Sinks | None:
    """Walk a body as its first turn runs it; what the ranks did in it, when any other turn does the same.

    None when a later turn may do something else, because it finds another value in a variable: then everything is as
    before the walk, and the variables hold what a first or a later turn may find in them.
    """
    start, gone, raised, frame = machine.mask, machine.gone, machine.raised, machine.frame
    returned, left = len(frame.results), len(frame.left_behind)
    exits, own_raises, events = len(machine.exits), len(machine.own_raises), dict(machine.events)
    number, outer_missed = machine.number(), machine.missed
    machine.missed = set()
    changes = loop in machine.changing
    machine.quiet += changes
    machine.store.begin()
    inner = machine.collect(turn)
    machine.quiet -= changes
    missed, machine.missed = machine.missed, outer_missed | machine.missed
    if not changes and _finds_the_same(machine, machine.store.latest(), missed, number):
        machine.store.keep()
        return inner
    machine.changing.add(loop)
    written = machine.store.undo()
    machine.mask, machine.gone, machine.raised = start, gone, raised
    del frame.results[returned:], frame.left_behind[left:], machine.exits[exits:], machine.own_raises[own_raises:]
    machine.events = events
    machine.store.merge(written)
    return None


def _finds_the_same(machine: Machine, before: Mapping[Cell, Value | None], missed: set[str], number: int) -> bool:
    """Whether a turn finds in every variable what the turn before found in it, or writes it before it reads it.

    ``before`` is what the variables held that a turn wrote, ``missed`` are the names that it looked up in vain, and
    ``number`` is smaller than the numbers of what it made.
    """
    scopes = {frame.scope for frame in machine.frames}
    for (owner, name), old in before.items():
        value = machine.store.get(owner, name)
        if old is not None:
            if value is not None and value is not old and join(old, value) != old:
                return False
        elif owner > number and owner in machine.outer_scopes:
            continue  # A variable of a function that was called: it ended with the call.
        elif owner in scopes:
            if name in missed:
                return False
        elif f".{name}" in missed or (owner < number and owner not in machine.events):
            return False  # Attributes of library objects are only read by their names, which would have been missed.
    return True
