"""Scripts that start their own ranks: the function that each rank runs is walked on all of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ddpdoctor.files import regex
from ddpdoctor.source.interpreter.attributes import base_names, bound_to, class_attribute
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    NONE,
    OPAQUE,
    RANKS,
    UNIFORM,
    Arguments,
    BoundMethod,
    Function,
    Instance,
    OneOf,
    Partial,
    ProjectClass,
    SequenceValue,
    Unknown,
    Value,
    is_guessed,
    on_rank,
    options_of,
    parts_of,
    per_rank,
)
from ddpdoctor.source.ranks.rank_local_values import OWN_KINDS
from ddpdoctor.source.ranks.ranks import GLOBAL_RANK, LOCAL_RANK, exact_per_rank
from ddpdoctor.source.script.module import Module, argument_of, last_name, parameters_of
from ddpdoctor.source.vocabulary import PROCESSES

# In the name of an option: a launcher may give another value to each process.
_OF_A_PROCESS = regex(r"rank|gpu|device|node|proc|world|main|master", re.IGNORECASE)
# What a loop goes over that counts its turns.
_COUNT = frozenset({"range", "enumerate"})
_CALLABLE = (Function, Partial, BoundMethod, ProjectClass, Instance)
"""What a rank may run: a function, or a class whose constructor trains."""


def spawn(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Run the function of ``torch.multiprocessing.spawn``, which gets the number of the process first.

    What a rank spawns is a job of its own: those processes are peers of each other, not of the other ranks.
    """
    if machine.spawns and not machine.in_parent:
        return NONE
    function = given.value("fn", 0) or UNIFORM
    arguments = given.value("args", 1) or SequenceValue(())
    _run_ranks(machine, node, function, arguments, with_index=True)
    return NONE


def start_process(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Run the function of ``Process(target=…)``: a rank when its arguments hold a number that counts the processes."""
    function = given.named.get("target", UNIFORM)
    if machine.spawns and machine.in_parent and isinstance(function, (Function, Partial)):
        _run_ranks(machine, node, function, given.named.get("args", SequenceValue(())), with_index=False)
    return Unknown()


def start_method(machine: Machine, node: ast.AST, process: Instance) -> Value | None:
    """Start an object of a class derived from that of processes, whose method ``run`` is the rank's; None of others."""
    if PROCESSES.isdisjoint(base_names(machine, process.cls)):
        return None
    run = class_attribute(machine, process.cls, "run")
    if machine.spawns and machine.in_parent and isinstance(run, Function):
        _run_ranks(machine, node, bound_to(run, process), SequenceValue(()), with_index=False)
    return NONE


def _counters(module: Module, call: ast.AST) -> Iterator[int]:
    """Yield the places, in the arguments of a process, of the variable that counts the processes that are started."""
    given = argument_of(call, "args")
    if isinstance(given, ast.Name):
        given = next(iter(module.assigned(module.body_around(call), given)), None)
    if not isinstance(given, (ast.Tuple, ast.List)):
        return
    counted: set[str] = set()
    for around in module.in_function(call):
        loops = around.generators if isinstance(around, (ast.ListComp, ast.GeneratorExp)) else [around]
        for loop in (one for one in loops if isinstance(one, (ast.For, ast.comprehension))):
            if last_name(getattr(loop.iter, "func", loop.iter)) in _COUNT:
                first = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else loop.target
                counted.add(last_name(first))
    for place, entry in enumerate(given.elts):
        if isinstance(entry, ast.Starred):
            return
        if isinstance(entry, ast.Name) and entry.id in counted:
            yield place


def run_callback(machine: Machine, node: ast.AST, given: Arguments, *, of_command_line: bool = False) -> Value:
    """Call the function that a runner is given; what stands on the command line is alike on all ranks.

    An option that is called like a rank or a device is not, where a launcher gives it.
    """
    function = given.positional[0] if given.positional else NONE
    options: dict[str, Value] = {}
    if of_command_line and isinstance(function, Function) and not isinstance(function.node, ast.Lambda):
        options = {name: UNIFORM for name in parameters_of(function.node) if not _OF_A_PROCESS.search(name)}
    if isinstance(function, (Function, Partial, OneOf)):
        return machine.apply(node, function, Arguments(named=options, complete=False))
    return OPAQUE


_CALLING = frozenset({"filter", "map", "reduce", "starmap"} | {"Thread", "Timer", "submit", "apply_async", "to_thread"})
"""Functions and methods that call what they are given, once or for each item, here or in a thread of the rank."""


def runs_given(machine: Machine, node: ast.AST, name: str, given: Arguments) -> bool:
    """Run the function of the project that a call hands on to be called, if it leads to a collective.

    The rank goes on behind the call, whatever the function does: a thread may run for as long as the rank.
    """
    if name.rpartition(".")[2] not in _CALLING:
        return False
    called = next((one for one in given.values if isinstance(one, Function)), None)
    if called is None or getattr(called.node, "name", "") not in machine.mentions.synchronising:
        return False
    arguments = given.named.get("args", NONE)
    known = isinstance(arguments, SequenceValue) and not arguments.open
    kept = machine.gone, machine.raised, machine.mask
    passed = Arguments(list(parts_of(arguments)) if known else (), complete=known)
    machine.call_function(node, called, passed)
    machine.gone, machine.raised, machine.mask = kept
    return True


def _handed_over(value: Value, *, by_spawn: bool) -> Value:
    """Return what ranks get from the process that starts them, which ``spawn`` gives to all of them alike."""
    if by_spawn and isinstance(value, Unknown) and value.varying:
        return Unknown(False, False, frozenset(tag for tag in value.tags if tag[0] not in OWN_KINDS))
    return Unknown(value.varying, False, value.tags) if isinstance(value, Unknown) and value.opaque else value


def _run_ranks(machine: Machine, node: ast.AST, function: Value, arguments: Value, *, with_index: bool) -> None:
    for key in machine.started.pop(node, ()):
        machine.objects.pop(key, None)  # That walk was taken back: what is made now is made later than what it made.
    before = set(machine.objects)
    try:
        for target in options_of(function):
            if isinstance(target, _CALLABLE):
                _run_target(machine, node, target, arguments, with_index=with_index)
    finally:
        machine.started[node] = machine.objects.keys() - before


def _run_target(machine: Machine, node: ast.AST, target: Value, arguments: Value, *, with_index: bool) -> None:
    lanes = [entry for entry in (on_rank(arguments, rank) for rank in RANKS) if isinstance(entry, SequenceValue)]
    known = len(lanes) == len(RANKS) and len({len(lane.values) for lane in lanes}) == 1
    known = known and not any(lane.open for lane in lanes)
    columns = zip(*(lane.values for lane in lanes), strict=True) if known else ()
    positional = [_handed_over(per_rank(column, is_guessed(arguments)), by_spawn=with_index) for column in columns]
    index = exact_per_rank(GLOBAL_RANK if machine.spawns else LOCAL_RANK)
    if with_index:
        positional.insert(0, index)
    elif isinstance(target, Function):
        for place in _counters(machine.frame.module, node):
            if place < len(positional):
                positional[place] = index
        parameters = [argument.arg for argument in target.node.args.args]
        for position, name in enumerate(parameters[: len(positional)]):
            if name in {"rank", "local_rank", "gpu", "global_rank"} and isinstance(positional[position], Unknown):
                positional[position] = index
    parent, machine.in_parent = machine.in_parent, False
    gone, raised, mask = machine.gone, machine.raised, machine.mask
    loops, machine.loops = machine.loops, []  # A loop that starts one process a turn is no loop of the rank.
    try:
        machine.apply(node, target, Arguments(positional, complete=known))
    finally:
        machine.in_parent, machine.loops = parent, loops
        machine.gone, machine.raised, machine.mask = gone, raised, mask
