"""Calls of project functions, methods and classes."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from ddpdoctor.finding import Frame
from ddpdoctor.source.events import ended_by, events_in
from ddpdoctor.source.interpreter.assignment import overwrite, settings_of
from ddpdoctor.source.interpreter.attributes import base_names, bound_to, class_attribute, family, promised_by_name
from ddpdoctor.source.interpreter.memory import MAXIMUM_DEPTH, Flags, Walks
from ddpdoctor.source.interpreter.scopes import (
    ARGUMENTS,
    NEVER,
    OF_UNKNOWN_NAMES,
    OF_UNKNOWN_PLACES,
    CallFrame,
    Origins,
    bound,
    signature_of,
)
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    ALL_RANKS,
    NO_ARGUMENTS,
    NO_GRADIENTS,
    NONE,
    OPAQUE,
    SYNCHRONISED,
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
    Unknown,
    Value,
    constant,
    derived,
    is_open,
    is_varying,
    merged_results,
    stamped,
    tagged,
    tags_of,
)
from ddpdoctor.source.libraries import sharding
from ddpdoctor.source.libraries.rank_attributes import HELPERS
from ddpdoctor.source.ranks.data_partitions import DIVIDING, ORDER, PIECES
from ddpdoctor.source.ranks.launches import runs_given
from ddpdoctor.source.ranks.random_numbers import FORGETS_ORDER, drawn, of_unread, orders
from ddpdoctor.source.ranks.rank_local_values import DECIDED, chooses_keys, chosen_by, reduced
from ddpdoctor.source.ranks.ranks import FIRST, guessed_per_rank
from ddpdoctor.source.script.module import Module, descend, last_name
from ddpdoctor.source.torch_model.choices import call_option
from ddpdoctor.source.torch_model.ddp import call_wrapped, is_thin_wrap, wrap_by_class
from ddpdoctor.source.torch_model.external_calls import call_external, call_method, make_helper
from ddpdoctor.source.torch_model.external_objects import make_sampler
from ddpdoctor.source.torch_model.recorded_calls import RESULT, bare_forward, note_absent, note_own_step
from ddpdoctor.source.vocabulary import (
    DATA_LOADER,
    DDP,
    DISTRIBUTED_SAMPLER,
    ENGINE,
    FIRST_RANK_DECORATORS,
    PREPARING_DATASETS,
    PROCESSES,
    SPAWNERS,
)

MAXIMUM_RECURSION = 1
STARTING = SPAWNERS | PROCESSES
_NAMED_TUPLE = "typing.NamedTuple"


def call(machine: Machine, node: ast.Call) -> Value:
    """Evaluate a call expression with all its effects."""
    function = machine.evaluate(node.func)
    given = arguments_of(machine, node)
    note_absent(machine, node.func, function)
    if isinstance(function, External) and function.name in _GO_OVER and given.positional:
        note_absent(machine, node.args[0], given.positional[0])
    return apply(machine, node, function, given)


# Builtins that fail where their first argument is None.
_GO_OVER = frozenset(
    f"builtins.{name}"
    for name in ("enumerate", "iter", "len", "list", "next", "range", "sorted", "sum", "tuple", "zip")
)


def arguments_of(machine: Machine, node: ast.Call) -> Arguments:
    """Return the values of the arguments of a call."""
    evaluate = machine.evaluate
    positional: list[Value] = []
    named: dict[str, Value] = {}
    complete = True
    for argument in node.args:
        if argument.__class__ is ast.Constant and complete:
            positional.append(Const(argument.value))
            continue
        given = argument.value if isinstance(argument, ast.Starred) else argument
        value = evaluate(given)
        if given is argument and complete:
            positional.append(value)
        elif isinstance(value, SequenceValue) and not value.open and complete:
            positional.extend(value.values)
        else:
            complete = False
            named[OF_UNKNOWN_PLACES] = derived((value, named.get(OF_UNKNOWN_PLACES, NONE)))
    for keyword in node.keywords:
        given = keyword.value
        value = Const(given.value) if given.__class__ is ast.Constant else evaluate(given)
        if keyword.arg is not None:
            named[keyword.arg] = value
        elif (settings := settings_of(value)) is not None:
            named.update(settings)
            complete = complete and not is_open(value)
        else:
            complete = False
            named[OF_UNKNOWN_NAMES] = value
    return Arguments(positional, named, complete)


def apply(machine: Machine, node: ast.AST, function: Value, given: Arguments = NO_ARGUMENTS) -> Value:
    """Call a value."""
    if function.__class__ is External:
        if not runs_given(machine, node, function.name, given) and function.name not in STARTING:
            machine.note_closures(given.values)
        result = call_external(machine, node, function.name, given)
        result = reduced(machine, node, function.name, None, given, result)
        return _ordered(machine, node, function, function.name, given, result)
    if function.__class__ is BoundMethod:
        if function.name == "step":
            machine.note_closures(given.positional)
        runs_given(machine, node, function.name, given)
        result = call_method(machine, node, function, given)
        if machine.wrapped and not machine.gradients and _evaluates(machine, function, given):
            result = bare_forward(machine, node, function.receiver, given, result)
        result = reduced(machine, node, function.name, function.receiver, given, result)
        return _ordered(machine, node, function, function.name, given, result)
    if function.__class__ is Function:
        result = call_function(machine, node, function, given)
        if function.receiver is not None and machine.wrapped:
            note_own_step(machine, node, function, given)
            return bare_forward(machine, node, function.receiver, given, result)
        return result
    if isinstance(function, ProjectClass):
        return construct(machine, node, function, given)
    if isinstance(function, Partial):
        positional = [*function.positional, *given.positional]
        more = Arguments(positional, {**dict(function.named), **given.named}, given.complete)
        return apply(machine, node, function.function, more)
    if isinstance(function, Instance):
        return _call_instance(machine, node, function, given)
    if isinstance(function, ExternalObject):
        return _call_built(machine, node, function, given)
    if (
        isinstance(function, PerRank)
        and function.guessed
        and all(isinstance(value, Const) for value in function.values)
    ):
        return function
    if isinstance(function, (OneOf, PerRank)):
        return call_option(machine, node, function, given)
    if isinstance(function, Unknown) and function.opaque and isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        promised = promised_by_name(machine, name)
        if promised is not None:
            return promised
    machine.note_unread(node, given.values)
    result = derived([function, *given.values])
    return Unknown(result.varying, opaque=True, tags=result.tags)


def _evaluates(machine: Machine, function: BoundMethod, given: Arguments) -> bool:
    """Return whether a model of a library, which DDP holds, makes something of a batch, as its ``generate`` does."""
    inner = function.receiver.number in machine.wrapped if isinstance(function.receiver, ExternalObject) else False
    return inner and any(kind == "batch" for value in given.values for kind, _ in tags_of(value))


def _ordered(machine: Machine, node: ast.AST, function: Value, name: str, given: Arguments, result: Value) -> Value:
    """Return the result of a library's call, marked where it draws an order, or cuts what has one into pieces."""
    last = name.rpartition(".")[2]
    result, becomes = drawn(machine, node, function, name, given, result)
    if becomes is not None and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        overwrite(machine, node.func.value, becomes)
    result = stamped(result, last, constant(given.positional[0]) if given.positional else "")
    if orders(function, name, given):
        drawn_here = frozenset({(ORDER, machine.object_number(node))})
        if last == "shuffle" and given.positional and isinstance(node, ast.Call) and node.args:
            overwrite(machine, node.args[0], tagged(given.positional[0], drawn_here))
        return tagged(result, drawn_here)
    if not any(kind == ORDER for kind, _ in tags_of(result)):
        return result
    if last in FORGETS_ORDER:
        kept = frozenset(tag for tag in tags_of(result) if tag[0] != ORDER)
        result = Unknown(is_varying(result), False, kept)
        if last == "sort" and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            overwrite(machine, node.func.value, result)
        return result
    return tagged(result, frozenset({(PIECES, machine.object_number(node))})) if last in DIVIDING else result


def _call_instance(machine: Machine, node: ast.AST, value: Instance, given: Arguments) -> Value:
    method = class_attribute(machine, value.cls, "__call__")
    if not isinstance(method, Function) and _worth_calling(machine, value):
        method = class_attribute(machine, value.cls, "forward")
    if isinstance(method, Function):
        result = call_function(machine, node, bound_to(method, value), given)
    else:
        result = derived(given.values)
    return _after_forward(machine, node, value, given, result)


def _after_forward(
    machine: Machine, node: ast.AST, value: Instance | ExternalObject, given: Arguments, result: Value
) -> Value:
    result = bare_forward(machine, node, value, given, result)
    return sharding.forward(machine, node, value, given, result) if machine.sharded else result


def _worth_calling(machine: Machine, value: Instance) -> bool:
    """Return whether a forward may run a collective: DDP calls it or is one of its parts, or by names in its class."""
    if machine.inside_ddp or value.cls.node.name in machine.mentions.synchronising:
        return True
    attributes = machine.store.held(value.number)
    holds_ddp = any(isinstance(part, ExternalObject) and part.name == DDP for part in attributes)
    return holds_ddp or chooses_keys(machine, value.cls)


def _call_built(machine: Machine, node: ast.AST, value: ExternalObject, given: Arguments) -> Value:
    if value.name == DDP:
        return call_wrapped(machine, node, value, given)
    if value.name == _NAMED_TUPLE and given.named and given.complete and not given.positional:
        return DictValue(tuple(given.named.items()))  # Its fields are read by their names.
    result = derived(given.values, frozenset({RESULT} if value.name == ENGINE else ()))
    return _after_forward(machine, node, value, given, result)


def construct(machine: Machine, node: ast.AST, cls: ProjectClass, given: Arguments) -> Value:
    """Make an instance of a project class; of one that is DDP under another name, a DDP object."""
    instance = Instance(machine.object_number(node), cls)
    method = class_attribute(machine, cls, "__init__")
    helper = next((name for name in base_names(machine, cls) if name in HELPERS), "") if cls.node.bases else ""
    if helper:
        machine.helpers[instance.number] = helper
        if not isinstance(method, Function):
            make_helper(machine, node, helper, given, instance.number)
    if cls.node.bases and is_thin_wrap(machine, cls):
        return wrap_by_class(machine, node, instance, method, given)
    if isinstance(method, Function):
        call_function(machine, node, bound_to(method, instance), given)
    else:
        for name, value in _fields(machine, cls, given).items():
            machine.assign(instance.number, name, value)
        finish = class_attribute(machine, cls, "__post_init__")
        if isinstance(finish, Function):
            call_function(machine, node, bound_to(finish, instance))
        if cls.node.bases and DISTRIBUTED_SAMPLER in base_names(machine, cls):
            make_sampler(machine, node, given, number=instance.number)
    if cls.node.bases:
        _note_preparation(machine, node, cls, given)
    machine.assign(instance.number, ARGUMENTS, derived(given.values))
    return ExternalObject(instance.number, DATA_LOADER) if instance.number in machine.loader_classes else instance


def _fields(machine: Machine, cls: ProjectClass, given: Arguments) -> Mapping[str, Value]:
    """Return what the fields of a dataclass or a ``NamedTuple`` hold: what they are given, in the order of the fields.

    Of defaults those that differ by rank: a setting that is a constant may be set later, by whatever fills settings.
    """
    made = family(machine, cls)
    by_field = any("dataclass" in ast.unparse(entry) for one in made for entry in one.node.decorator_list)
    if not given.complete or not (by_field or "typing.NamedTuple" in base_names(machine, cls)):
        return given.named
    declared = (node for one in reversed(made) for node in one.node.body if isinstance(node, ast.AnnAssign))
    names = list(dict.fromkeys(node.target.id for node in declared if isinstance(node.target, ast.Name)))
    defaults = {name: class_attribute(machine, cls, name) for name in names}
    varying = {name: value for name, value in defaults.items() if value is not None and is_varying(value)}
    return {**varying, **dict(zip(names, given.positional, strict=False)), **given.named}


def _note_preparation(machine: Machine, node: ast.AST, cls: ProjectClass, given: Arguments) -> None:
    """Record a data set of the project whose base, of a library, calls methods of it while it is made."""
    for name in base_names(machine, cls):
        if any(class_attribute(machine, cls, method) for method in PREPARING_DATASETS.get(name, ())):
            machine.note("object", f"{name}.{cls.node.name}", node, given)


def call_function(
    machine: Machine,
    node: ast.AST,
    function: Function,
    given: Arguments = NO_ARGUMENTS,
    on_yield: Callable[[Value], None] | None = None,
) -> Value:
    """Run a project function on the present ranks and return what it returns."""
    if function.first_rank_only:
        held: list[Value] = [NONE]
        test = guessed_per_rank(FIRST)
        unguarded = msgspec.structs.replace(function, first_rank_only=False)

        def run() -> None:
            held[0] = call_function(machine, node, unguarded, given, on_yield)

        machine.split(node, test, run, lambda: None)
        return held[0]
    module = machine.script.module(function.module)
    active = sum(one.owner is not None and one.owner.node is function.node for one in machine.frames)
    of_batch = any(kind in ("batch", "ddp") for value in given.values for kind, _ in tags_of(value))
    flags = _flags(given)
    anew = machine.effort.is_called_anew(function.node, flags)
    skipped = not anew and on_yield is None and machine.can_skip(function.node, of_batch)
    if module is None or active > MAXIMUM_RECURSION or skipped:
        return of_unread(machine, function, given.values)
    origins = _origins(given)
    known = None if anew else machine.effort.passes_over(function.node, machine.steps, of_batch, origins)
    if known is not None or len(machine.frames) > MAXIMUM_DEPTH:
        if function.node in machine.agreeing:
            _write_through(machine, node, function)
        result = _passed_over(machine, function, module, known, on_yield)
        return result if known is None else _of_this_call(machine, function, result, known, given)
    machine.visited.add(function.node)
    started = machine.steps
    machine.effort.note(function.node, 0, NONE, None, began=True)
    machine.effort.note_flags(function.node, flags)
    # The scopes of the functions that a nested function stands in; a method does not see its class.
    around = machine.outer_scopes.get(function.scope, ())
    frame = CallFrame(_qualified(function), module, machine.number(), around)
    frame.owner, frame.on_yield, frame.origins, frame.entry = function, on_yield, origins, machine.mask
    frame.loops_outside, frame.call = len(machine.loops), node
    machine.outer_scopes[frame.scope] = frame.scopes
    caller = machine.frame
    site = Frame(caller.file, getattr(node, "lineno", 1), caller.function or "<module>")
    entry = machine.mask
    if function.node in machine.settings and not given.values:
        given = Arguments((machine.settings[function.node],))
    values = given.positional if function.receiver is None else [function.receiver, *given.positional]
    for name, value in bound(signature_of(function.node), values, given).items():
        machine.store.set(frame.scope, name, value)
    emitted, oldest = machine.emitted, machine.store.oldest_written
    machine.store.oldest_written = NEVER
    gradients = machine.gradients
    machine.gradients = gradients and function.gradients
    machine.frames.append(frame)
    machine.calls.append(site)
    try:
        body, what = partial(_run_body, machine, function), partial(_named, function, module)
        inner = machine.collect_safely(body, function.node, what)
    finally:
        machine.calls.pop()
        machine.frames.pop()
        machine.gradients = gradients
    machine.add_call(inner)
    for written in frame.left_behind:
        machine.store.merge(written, frame.own is not None)
        if frame.own:
            machine.mark_decided(machine.store, written)
    machine.mask = entry & ~machine.gone & ~(ended_by(inner, "raise", "exit") & ~frame.returning)
    if frame.agreed:
        machine.agreeing.setdefault(function.node, set()).update(frame.agreed)
        _write_through(machine, node, function)
    if frame.yielded is None:
        returned = merged_results(frame.results, NONE, entry)
        if frame.own and isinstance(returned, Unknown) and any(one != frame.results[0] for one in frame.results):
            returned = tagged(Unknown(True, returned.opaque, returned.tags, returned.not_none), frozenset({DECIDED}))
        elif frame.by_rank and isinstance(returned, OneOf):
            returned = OneOf(returned.options, True)
    else:
        ends = [frame.own, *(loop.own or loop.bound for loop in frame.giving)]
        returned = SequenceValue((chosen_by(list(filter(None, ends)), frame.yielded),), open=True)
    quiet = emitted == machine.emitted and machine.mask == entry and on_yield is None
    changed_nothing = machine.store.oldest_written >= frame.scope
    # A constant is worth its walks: `if not is_initialized(): return 0` keeps every rank but 0 from its own number.
    returns_nothing = returned == NONE or isinstance(returned, Unknown)
    machine.note_walk(function.node, barren=quiet and changed_nothing and returns_nothing, of_batch=of_batch)
    machine.store.oldest_written = min(machine.store.oldest_written, oldest)
    machine.effort.note(
        function.node,
        machine.steps - started,
        returned,
        inner if entry == ALL_RANKS else None,
        ran_nothing=not any(items and next(events_in(tuple(items)), None) for items in inner),
        of_batch=of_batch,
        origins=origins,
    )
    return returned


def _flags(given: Arguments) -> Flags:
    by_key: list[tuple[int | str, Value]] = [*enumerate(given.positional), *given.named.items()]
    return tuple((key, value.value) for key, value in by_key if isinstance(value, Const) and type(value.value) is bool)


def _origins(given: Arguments) -> Origins:
    """Return what the arguments of a call come from, those left out that are the same on all ranks and of nothing."""
    by_key: list[tuple[int | str, Value]] = [*enumerate(given.positional), *given.named.items()]
    found = ((key, is_varying(value), tags_of(value)) for key, value in by_key)
    return frozenset(one for one in found if one[1] or one[2])


def _of_this_call(machine: Machine, function: Function, result: Value, known: Walks, given: Arguments) -> Value:
    """Return what earlier walks of a function gave for one more call, without what their own arguments came from."""
    origins = _origins(given)
    if result is not known.result or origins in known.results:
        return known.results.get(origins, result) if result is known.result else result
    here = {tag for _, _, tags in origins for tag in tags}
    elsewhere = {tag for given in known.results for _, _, tags in given for tag in tags} - here
    return of_unread(machine, function, given.values) if tags_of(result) & elsewhere else result


def _write_through(machine: Machine, node: ast.AST, function: Function) -> None:
    """Give the caller's variables what a collective in the function has written into its parameters."""
    if not isinstance(node, ast.Call) or any(isinstance(argument, ast.Starred) for argument in node.args):
        return
    stored = {
        inner.id for inner in descend(function.node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
    }
    names = [argument.arg for argument in function.node.args.args][function.receiver is not None :]
    given = {**dict(zip(names, node.args, strict=False)), **{entry.arg or "": entry.value for entry in node.keywords}}
    for name in sorted(machine.agreeing[function.node] & given.keys() - stored):
        target = given[name]
        if isinstance(target, (ast.Name, ast.Attribute)):
            overwrite(machine, target, SYNCHRONISED)
            if isinstance(target, ast.Name):
                machine.frame.agreed.add(target.id)


def _named(function: Function, module: Module) -> str:
    return f"{_qualified(function)} ({module.path})"


def _passed_over(
    machine: Machine, function: Function, module: Module, known: Walks | None, on_yield: Callable[[Value], None] | None
) -> Value:
    """Use the result of earlier walks of a function for one more call of it."""
    synchronises = getattr(function.node, "name", "") in machine.mentions.synchronising
    synchronises = synchronises and (known is None or not known.silent)
    if known is None or (synchronises and not known.alike and not known.items):
        machine.effort.cut[function.node] = _named(function, module)
    if on_yield is not None:
        on_yield(OPAQUE)
        return OPAQUE
    if known is None or not known.alike:
        alone = machine.mask != ALL_RANKS & ~machine.gone or bool(machine.own_tests)
        machine.uncertain = machine.uncertain or (synchronises and alone)
    if known is None or not known.items:
        return OPAQUE
    if synchronises:
        machine.add_call([list(items) if machine.mask >> rank & 1 else [] for rank, items in enumerate(known.items)])
    return known.result


def _run_body(machine: Machine, function: Function) -> None:
    frame = machine.frame
    if isinstance(function.node, ast.Lambda):
        frame.results.append((machine.mask, machine.evaluate(function.node.body)))
        return
    machine.execute(function.node.body)
    if machine.mask and frame.results:
        frame.results.append((machine.mask, NONE))


def _qualified(function: Function) -> str:
    name = function.node.name if not isinstance(function.node, ast.Lambda) else "<lambda>"
    return f"{function.owner.node.name}.{name}" if function.owner is not None else name


def run_class_body(machine: Machine, statement: ast.ClassDef, scope: int) -> None:
    """Run the body of a class in its scope."""
    outer = machine.frame
    frame = CallFrame(statement.name, outer.module, scope, outer.scopes)
    machine.outer_scopes[scope] = outer.scopes
    machine.frames.append(frame)
    try:
        machine.execute(statement.body)
    finally:
        machine.frames.pop()


def decorated(machine: Machine, decorator: ast.expr, value: Value) -> Value:
    """Return what a decorator makes of a function."""
    last = last_name(decorator.func if isinstance(decorator, ast.Call) else decorator)
    if last in {"property", "cached_property", "staticmethod", "classmethod", "contextmanager", "setter", "wraps"}:
        return value
    applied = machine.evaluate(decorator)
    if isinstance(value, Function):
        if isinstance(decorator, ast.Call) and machine.evaluate(decorator.func) == External("hydra.main"):
            from ddpdoctor.source.libraries.hydra import configure

            configure(machine, value)
            return value
        if applied == NO_GRADIENTS:
            return msgspec.structs.replace(value, gradients=False)
        if last in FIRST_RANK_DECORATORS and not isinstance(applied, (Function, ProjectClass)):
            return msgspec.structs.replace(value, first_rank_only=True)
    if isinstance(applied, (Function, ProjectClass, Instance)):
        result = apply(machine, decorator, applied, Arguments((value,)))
        if isinstance(result, (Function, Instance)):
            return result
        if last in FIRST_RANK_DECORATORS and isinstance(value, Function):
            return msgspec.structs.replace(value, first_rank_only=True)
    return value


def context_function(
    machine: Machine, node: ast.Call, function: Value
) -> Callable[[Callable[[Value], None]], None] | None:
    """Return a runner for a ``with`` item that calls a project function made a context manager by ``contextlib``."""
    if not isinstance(function, Function) or isinstance(function.node, ast.Lambda):
        return None
    names = {last_name(entry) for entry in function.node.decorator_list}
    if not names & {"contextmanager", "asynccontextmanager"}:
        return None

    def run(on_yield: Callable[[Value], None]) -> None:
        given = arguments_of(machine, node)
        body_frame = machine.frame
        calls = list(machine.calls)

        def in_caller(value: Value) -> None:
            inner_frames = machine.frames
            inner_calls = machine.calls
            machine.frames = machine.frames[: machine.frames.index(body_frame) + 1]
            machine.calls = calls
            try:
                on_yield(value)
            finally:
                machine.frames = inner_frames
                machine.calls = inner_calls

        call_function(machine, node, function, given, in_caller)

    return run
