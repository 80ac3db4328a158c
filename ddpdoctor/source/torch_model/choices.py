"""Calls of what a condition, a table or a function of the project chooses: which of several is read."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from functools import partial, reduce

import msgspec

from ddpdoctor.files import regex
from ddpdoctor.source.interpreter.attributes import makes_model
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    MAXIMUM_OPTIONS,
    NO_CONTEXT,
    NO_SYNC,
    NONE,
    RANKS,
    UNIFORM,
    Arguments,
    BoundMethod,
    Const,
    DictValue,
    External,
    ExternalObject,
    Function,
    Instance,
    OneOf,
    Partial,
    PerRank,
    ProjectClass,
    SequenceValue,
    TensorSize,
    Value,
    derived,
    join,
    on_rank,
    options_of,
    per_rank,
    tags_of,
)
from ddpdoctor.source.script.module import descend, dotted, last_name, once_each
from ddpdoctor.source.vocabulary import DDP, MODULE, MODULE_SELF_METHODS, OPTIMIZER, SHARDED_WRAPPER

_LIKE_TORCH = ("torch.", "torchvision.", "torchaudio.", "torchtext.")
_OPTIMIZER_CLASS = regex(r"torch\.optim\.(?!lr_scheduler|swa_utils)")
_TRAINS = regex(r"train|fit|tune")
_SCHEDULER = "torch.optim.lr_scheduler.LRScheduler"


def call_option(machine: Machine, node: ast.AST, function: Value, given: Arguments) -> Value:
    """Call one of several: DDP if it is among them (as in a job with ranks), else the first that can be read.

    Of those that can be read, one that leads to a collective is the one for ranks; where all do, each is called.
    """
    here = machine.present(function)
    if not isinstance(here, (OneOf, PerRank)) and _is_of_an_object(here):
        return machine.apply(node, here, given)  # A writer that only these ranks have.
    if isinstance(here, PerRank) and _is_each_its_own(machine, here):
        return _each_its_own(machine, node, here, given)
    options = list(options_of(function))
    if isinstance(function, OneOf) and (
        _is_of_each(machine, node, options)
        or _all_train(machine, options)
        or _is_ddp_or_sharded(machine, options)
        or _is_of_project_or_library(options)
    ):
        results: list[Value] = []

        def call_one(option: Value) -> None:
            results.append(machine.apply(node, option, given))

        # Each walks a whole training: four take four times as long as one.
        machine.fork([partial(call_one, option) for option in options[:MAXIMUM_OPTIONS]])
        return reduce(join, results) if _all_train(machine, options) else derived(results)
    if isinstance(function, OneOf) and all(makes_model(machine, option) for option in options):
        return _any_model(machine, node, options, given)
    contexts = tuple(context for option in options if (context := _context_of(option)) is not None)
    if len(contexts) == len(options):
        return OneOf(contexts)
    method = _method_of_any(options)
    if method is not None:
        return machine.apply(node, method, given)
    for option in options:
        if isinstance(option, ExternalObject) and option.name == DDP:
            return machine.apply(node, option, given)
    if all(isinstance(option, External) and _OPTIMIZER_CLASS.match(option.name) for option in options):
        return machine.apply(node, External(OPTIMIZER), given)
    for option in options:
        if isinstance(option, External) and option.name.startswith(_LIKE_TORCH):
            return machine.apply(node, option, given)
    readable = [one for one in options if isinstance(one, (Function, ProjectClass, Instance, Partial, ExternalObject))]
    if readable:
        chosen = max(readable, key=lambda one: (_joins(machine, one), _may_synchronise(machine, one)))
        value = machine.apply(node, chosen, given)
        if isinstance(chosen, ProjectClass) and _may_synchronise(machine, chosen):
            return value  # The object for ranks: its methods join the group and wrap the model.
        return _of_any_class(value) or join(value, derived((value,)))
    return derived([function, *given.values])


def _any_model(machine: Machine, node: ast.AST, options: Sequence[Value], given: Arguments) -> Value:
    """Make a model of each class that a setting chooses from, as objects of their own."""
    made: list[Value] = []

    def make(number: int) -> None:
        machine.phases.append(number)
        try:
            made.append(machine.apply(node, options[number], given))
        finally:
            machine.phases.pop()

    machine.fork([partial(make, number) for number in range(min(len(options), MAXIMUM_OPTIONS))])
    return reduce(join, made)


def _context_of(option: Value) -> Value | None:
    """Return the context manager that calling an option makes, which changes nothing or what DDP does; else None."""
    if isinstance(option, BoundMethod) and option.name == "no_sync":
        return NO_SYNC
    return NO_CONTEXT if option == NO_CONTEXT else None


def note_commands(machine: Machine, named: Mapping[str, Value]) -> None:
    """Note the functions among the defaults of a subcommand: ``train_parser.set_defaults(func=train)``."""
    for attribute, value in named.items():
        if isinstance(value, Function) and value not in machine.commands.setdefault(attribute, []):
            machine.commands[attribute].append(value)


def chosen_command(functions: Sequence[Function]) -> Value:
    """Return what the options hold for the functions of several subcommands: of a job, the one that trains."""
    training = [one for one in functions if _TRAINS.search(getattr(one.node, "name", ""))]
    chosen = training or functions
    return chosen[0] if len(chosen) == 1 else OneOf(tuple(chosen))


MERGES = frozenset({"merge_from_file", "merge_from_list", "merge_from_dict", "merge_from_other_cfg"})
"""Methods of yacs, fvcore, detectron2 and mmcv by which settings of the user replace the defaults."""


def merge(machine: Machine, receiver: Value) -> Value:
    """Make the settings of a configuration and of those in it unknown, but the same on every rank."""
    waiting = [option for option in options_of(receiver) if isinstance(option, ExternalObject)]
    seen: set[int] = set()
    while waiting:
        number = waiting.pop().number
        if number in seen:
            continue
        seen.add(number)
        for name in machine.store.names(number):
            value = machine.store.get(number, name)
            if isinstance(value, (Const, DictValue, SequenceValue)):
                machine.assign(number, name, UNIFORM)
            elif isinstance(value, ExternalObject):
                waiting.append(value)
    return UNIFORM


def _is_each_its_own(machine: Machine, function: PerRank) -> bool:
    """Return whether the present ranks call different code of the project, each its own.

    As where the first rank has a manager, and the others something of the same form that does nothing, where one of two
    functions is chosen by the rank, or where only some ranks have one more callback in their list.
    """
    here = [list(options_of(entry)) for rank, entry in enumerate(function.values) if machine.mask >> rank & 1]
    code = {frozenset(id(one.node) for one in entry if isinstance(one, Function)) for entry in here}
    return len(code) > 1 and all(_is_known(one) for entry in here for one in entry)


def _is_known(one: Value) -> bool:
    return isinstance(one, (Function, External)) or (
        isinstance(one, BoundMethod) and isinstance(one.receiver, Instance)
    )


def _each_its_own(machine: Machine, node: ast.AST, function: PerRank, given: Arguments) -> Value:
    """Call on every present rank the method that it has there."""
    results: list[Value] = [NONE] * len(RANKS)
    reached = 0

    def call_one(option: Value) -> None:
        ranks = machine.mask
        result = machine.apply(node, option, given)
        for rank in RANKS:
            if ranks >> rank & 1:
                results[rank] = on_rank(result, rank)

    for option in dict.fromkeys(function.values):
        ranks = sum(1 << rank for rank, entry in enumerate(function.values) if entry == option) & machine.mask
        reached |= machine.on(ranks, getattr(node, "func", node), function, partial(call_one, option))
    machine.mask = reached
    return per_rank(results, function.guessed)


def _is_ddp_or_sharded(machine: Machine, options: Sequence[Value]) -> bool:
    """Return whether a setting chose between DDP's wrapper and the sharded one, and nothing here knows which it is.

    What is called of each differs: a state dict of the sharded one is a collective. No longer open is the choice below
    a test of that setting or of the object's class, and behind one that leaves.
    """
    owners = [option.receiver if isinstance(option, BoundMethod) else option for option in options]
    made = {owner.name: machine.object(owner) for owner in owners if isinstance(owner, ExternalObject)}
    sharded = made.get(SHARDED_WRAPPER)
    if sharded is None or DDP not in made:
        return False
    chosen_by = [test for _, test in sharded.undecided]
    settings = set[str]().union(*map(_settings_in, chosen_by))
    tests = [test for _, test in machine.conditions] + [guard.node for guard in machine.guards]
    for frame in machine.frames:
        around = frame.owner.node if frame.owner is not None else frame.module.tree
        tests += [
            inner.test
            for inner in frame.module.index.within(around, ast.If)
            if inner.test not in chosen_by
            and any(isinstance(arm[-1], _LEAVES) for arm in (inner.body, inner.orelse) if arm)
        ]
    return not any(_settings_in(test) & settings or _asks_for_class(test) for test in tests)


_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def _settings_in(test: ast.AST) -> set[str]:
    if isinstance(test, ast.Call) and isinstance(test.func, ast.Attribute):
        return _settings_in(test.func.value).union(*map(_settings_in, test.args))
    name = dotted(test)
    return {name} if name else set[str]().union(*map(_settings_in, ast.iter_child_nodes(test)))


def _asks_for_class(test: ast.AST) -> bool:
    calls = (inner for inner in descend(test) if isinstance(inner, ast.Call))
    return any(last_name(call.func) in ("isinstance", "hasattr", "type", "getattr") for call in calls)


def _may_synchronise(machine: Machine, option: Value) -> bool:
    """Return whether a function or a class of the project is the one for ranks: it leads to a collective."""
    owner = option.cls if isinstance(option, Instance) else option
    if not isinstance(owner, (Function, ProjectClass)):
        return False
    return getattr(owner.node, "name", "") in machine.mentions.synchronising


def _is_of_an_object(function: Value) -> bool:
    """Return whether what is called is no method of mere data."""
    owner = function.receiver if isinstance(function, BoundMethod) else function
    return not isinstance(owner, (Const, SequenceValue, DictValue, TensorSize)) and not tags_of(owner)


def _is_of_each(machine: Machine, node: ast.AST, options: list[Value]) -> bool:
    """Return whether a loop calls each of several functions, or a method of each object: the callbacks of a trainer."""
    read = all(isinstance(one, Function) for one in options) or (
        all(isinstance(one, (Function, Instance, Partial)) for one in options)
        and any(_may_synchronise(machine, one) for one in options)
    )
    target = getattr(machine.loops[-1].around.node, "target", None) if machine.loops and read else None
    if target is None or not isinstance(node, ast.Call):
        return False
    names = {inner.id for inner in descend(target) if isinstance(inner, ast.Name)}
    return any(isinstance(inner, ast.Name) and inner.id in names for inner in descend(node.func))


def _is_of_project_or_library(options: Sequence[Value]) -> bool:
    """Return whether the object of a method is one of the project's or one of a library's: a sampler of either."""
    owners = [one.receiver for one in options if isinstance(one, (Function, BoundMethod))]
    return {type(owner) for owner in owners} == {Instance, ExternalObject} and len(owners) == len(options)


def _all_train(machine: Machine, options: list[Value]) -> bool:
    """Return whether a setting chooses between ways to train: each option leads to a collective, or its object does.

    Where only some of them make the process group, they are the ways for a job with ranks, and the others for one
    without.
    """
    joining = {_joins(machine, option) for option in options}
    return len(joining) == 1 and all(
        _may_synchronise(machine, option)
        or (isinstance(option, Function) and _may_synchronise(machine, option.receiver or NONE))
        for option in options
    )


def _joins(machine: Machine, option: Value) -> bool:
    """Return whether a class of the project, or that of a method's object, makes the process group."""
    owner = option.receiver if isinstance(option, Function) else option
    owner = owner.cls if isinstance(owner, Instance) else owner
    return isinstance(owner, ProjectClass) and _makes_group(machine, owner.node)


@once_each
def _makes_group(machine: Machine, cls: ast.ClassDef) -> bool:
    calls = (node for node in descend(cls) if isinstance(node, ast.Call))
    return any(last_name(call.func) == "init_process_group" for call in calls)


def _method_of_any(options: Sequence[Value]) -> BoundMethod | None:
    """Return one method of whichever optimizer it is, or one that gives back whichever model it is; else None.

    What steps or zeroes gradients is an optimizer, of whichever library.
    """
    methods = [
        option
        for option in options
        if isinstance(option, BoundMethod)
        and (
            option.name in ("step", "zero_grad")
            or _is_training_state(option.receiver)
            or (option.name in MODULE_SELF_METHODS and is_model(option.receiver))
        )
    ]
    if len(methods) < len(options) or len({method.name for method in methods}) != 1:
        return None
    return BoundMethod(OneOf(tuple(method.receiver for method in methods)), methods[0].name)


def is_model(value: Value) -> bool:
    """Return whether something is a module of torch, or an object of the project, which may be one; of several, all."""
    return all(
        isinstance(option, Instance) or (isinstance(option, ExternalObject) and MODULE.search(option.name) is not None)
        for option in options_of(value)
    )


def _of_any_class(made: Value) -> Value | None:
    """Return what one of several functions makes as an optimizer or a scheduler of unknown class; None for others."""
    options = list(options_of(made))
    if not options or not all(_is_training_state(option) for option in options):
        return None
    first = options[0]
    assert isinstance(first, ExternalObject)
    return msgspec.structs.replace(first, name=_SCHEDULER if "lr_scheduler" in first.name else OPTIMIZER)


def _is_training_state(value: Value) -> bool:
    return isinstance(value, ExternalObject) and value.name.startswith("torch.optim.")
