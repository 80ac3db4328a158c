"""Walks statements on the four ranks."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial

from ddpdoctor.files import regex
from ddpdoctor.source.events import ContextAround, Item, Jump, LoopAround, OwnTest, before_jumps, ended_by
from ddpdoctor.source.interpreter.assignment import assign_to, columns_of, filled_under, known_items, scope_of
from ddpdoctor.source.interpreter.attributes import bound_to, class_attribute
from ddpdoctor.source.interpreter.calls import decorated, run_class_body
from ddpdoctor.source.interpreter.expressions import evaluate, is_context_manager, truth_of
from ddpdoctor.source.interpreter.imports import run_import
from ddpdoctor.source.interpreter.loops import ends_anyway, first_walk, iterated, opened, phases
from ddpdoctor.source.interpreter.scopes import LoopFrame
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    NO_GRADIENTS,
    NO_SYNC,
    NONE,
    RANKS,
    UNIFORM,
    Arguments,
    BoundMethod,
    Const,
    DictValue,
    External,
    Function,
    Instance,
    ProjectClass,
    SequenceValue,
    Unknown,
    Value,
    by_rank,
    constant,
    derived,
    is_varying,
    options_of,
    tagged,
    tags_of,
    varied,
)
from ddpdoctor.source.ranks.rank_local_values import COUNTED, TRAINED_ITEM, UNREAD_ITEM, carried, own_iterable, own_test
from ddpdoctor.source.script.module import Module, descend, dotted, last_name
from ddpdoctor.source.torch_model.recorded_calls import note_absent, note_augmented
from ddpdoctor.source.vocabulary import SAME_ITEMS

# Functions that give every item of their first argument, or as many numbers.
_EVERY_ITEM = SAME_ITEMS - {"zip", "next"} | {"sorted", "range", "len"}
_SHOWING = SAME_ITEMS - {"enumerate", "zip", "next", "reversed", "trange"}
"""Functions that give the items of their first argument, nothing else and nothing more."""
_COUNTING = frozenset({"range", "trange", "count"})
_TRIED_WALKS = 2
"""Walks of a loop that are taken back where a later turn finds something else: what one turn sets, another may ask."""
# Name of a flag that is set in a job with ranks.
_HAS_RANKS = regex(r"^(is_|use_)?(distributed|ddp)$")


def execute(machine: Machine, body: Sequence[ast.stmt]) -> None:
    """Run statements until no rank is left to run the next one."""
    for statement in body:
        if not machine.mask:
            return
        machine.steps += 1
        handler = _HANDLERS.get(statement.__class__)
        if handler is not None:
            handler(machine, statement)


def _assign(machine: Machine, statement: ast.Assign) -> None:
    value = carried(machine, statement, evaluate(machine, statement.value))
    for target in statement.targets:
        assign_to(machine, target, value)


def _annotated(machine: Machine, statement: ast.AnnAssign) -> None:
    if statement.value is not None:
        assign_to(machine, statement.target, evaluate(machine, statement.value))


def _augmented(machine: Machine, statement: ast.AugAssign) -> None:
    if isinstance(statement.target, ast.Attribute):
        note_augmented(machine, statement.target, statement.value)
    before = copy(statement.target)
    before.ctx = ast.Load()
    after = ast.copy_location(ast.BinOp(before, statement.op, statement.value), statement)
    assign_to(machine, statement.target, carried(machine, statement, evaluate(machine, after)))


def _if(machine: Machine, statement: ast.If) -> None:
    machine.split(
        statement.test,
        truth_of(machine, statement.test),
        lambda: execute(machine, statement.body),
        lambda: execute(machine, statement.orelse),
    )


def _for(machine: Machine, statement: ast.For | ast.AsyncFor) -> None:
    iterable = opened(machine, statement.iter)
    note_absent(machine, statement.iter, iterable)
    for number, (phase, ranks) in enumerate(turns_apart := phases(statement, iterable)):
        if here := machine.mask & ranks:
            run = partial(_phase, machine, statement, iterable, phase, number)
            others = machine.mask & ~ranks
            if others:
                by = filled_under(machine, _gone_over(machine.frame.module, statement.iter))
                test, value, module = (statement.iter, iterable, None) if by is None else (by.node, by.value, by.module)
                machine.mask = machine.on(here, test, value, run, module) | others
            else:
                run()
    if turns_apart:
        execute(machine, statement.orelse)
        return
    item, turns, empty = iterated(machine, iterable)
    start = machine.mask
    machine.mask &= ~empty
    if machine.mask:
        over = _gone_over(machine.frame.module, statement.iter)
        whole = machine.held(over)
        once = all(count is not None and count <= 1 for count in turns)
        around = LoopAround(statement, machine.frame.module, iterable, once, whole)
        own = None if _has_known_keys(machine, over) else own_iterable(machine, statement.iter, iterable)

        if (columns := columns_of(known_items(iterable))) and isinstance(item, SequenceValue):
            parts = zip(columns, item.values, strict=True)
            item = SequenceValue(tuple(_marked(machine, statement, part, column) for column, part in parts))
        else:
            item = _marked(machine, statement, item, known_items(iterable))

        def turn() -> None:
            assign_to(machine, statement.target, item)
            if isinstance(statement.target, (ast.Tuple, ast.List)) and COUNTED in tags_of(iterable):
                for counter in statement.target.elts[:1]:  # What ``enumerate`` counts is the same on every rank.
                    assign_to(machine, counter, UNIFORM)
            execute(machine, statement.body)

        if empty & start:
            machine.mask = machine.on(
                machine.mask, statement.iter, iterable, lambda: _loop(machine, around, turn, turns)
            )
        else:
            _loop(machine, around, turn, turns, lambda: own)
    machine.mask |= empty & start
    execute(machine, statement.orelse)


def _feeds_a_model(machine: Machine, loop: ast.For | ast.AsyncFor) -> bool:
    """Return whether the body of a loop trains a model that works on each rank's own data: each has its own items."""
    inside = [node for part in loop.body for node in descend(part)] if machine.gradients else []
    calls = [node for node in inside if isinstance(node, ast.Call)]
    models = (machine.held(part) for call in calls for part in (call.func, *call.args))
    trains = any(last_name(call.func) in machine.mentions.synchronising | {"backward"} for call in calls)
    return trains and any(map(machine.is_parallel, models))


def _gone_over(module: Module, iterable: ast.expr) -> ast.expr:
    """Return that of which calls around it give every item, or the number: ``x`` of ``enumerate(tqdm(x))``.

    What is drawn from it, cut, or laid beside something else may be less. A number may have a name, which is set once.
    """
    function = ""
    while isinstance(iterable, ast.Call) and iterable.args and last_name(iterable.func) in _EVERY_ITEM:
        function = last_name(iterable.func)
        iterable = iterable.args[function == "range" and len(iterable.args) > 1]
    if function == "range" and isinstance(iterable, ast.Name):
        values = module.assigned(module.body_around(iterable), iterable)
        if len(values) == 1 and isinstance(values[0], ast.Call) and last_name(values[0].func) == "len":
            return _gone_over(module, values[0])
    return iterable


def _has_known_keys(machine: Machine, iterable: ast.expr) -> bool:
    """Return whether a loop goes over a dict whose keys are known, whatever was picked for its values."""
    if isinstance(iterable, ast.Call) and isinstance(iterable.func, ast.Attribute) and not iterable.args:
        iterable = iterable.func.value if iterable.func.attr in ("items", "keys", "values") else iterable
    return all(isinstance(option, DictValue) for option in options_of(machine.held(iterable)))


def _marked(machine: Machine, loop: ast.For | ast.AsyncFor, item: Value, items: Sequence[Value]) -> Value:
    """Return what stands for some items, marked where nothing is known of them and they are no counts."""
    if not isinstance(item, Unknown) or item.varying or item.tags - {COUNTED}:
        return item
    if _counts(machine.frame.module, loop.iter):
        return item
    if items and not any(isinstance(one, (Unknown, BoundMethod)) for one in items):
        return item
    if not _feeds_a_model(machine, loop):
        return tagged(item, frozenset({UNREAD_ITEM}))
    return Unknown(True, item.opaque, item.tags | {UNREAD_ITEM, TRAINED_ITEM}, item.not_none)


def _counts(module: Module, iterable: ast.expr, looked: int = 0) -> bool:
    """Return whether a loop counts numbers up, alike on every rank: a range, shown by a bar or not."""
    while isinstance(iterable, ast.Call) and last_name(iterable.func) in _SHOWING and iterable.args:
        iterable = iterable.args[0]
    if isinstance(iterable, ast.Call):
        return last_name(iterable.func) in _COUNTING
    if not isinstance(iterable, ast.Name) or looked > 2:
        return False
    values = module.assigned(module.body_around(iterable), iterable)
    # `turns = tqdm(turns)` on one rank goes over what the others do.
    made = [value for value in values if not (isinstance(value, ast.Call) and _shows(value, iterable.id))]
    return bool(made) and all(_counts(module, value, looked + 1) for value in made)


def _shows(call: ast.Call, name: str) -> bool:
    return last_name(call.func) in _SHOWING and bool(call.args) and dotted(call.args[0]) == name


def _phase(machine: Machine, statement: ast.For | ast.AsyncFor, iterable: Value, phase: Value, number: int) -> None:
    """Walk one turn of a loop over phases: what it does follows on what the turn before did."""

    def turn() -> None:
        assign_to(machine, statement.target, phase)
        execute(machine, statement.body)

    machine.phases.append(number)
    try:
        _loop(machine, LoopAround(statement, machine.frame.module, iterable, True), turn, None)
    finally:
        machine.phases.pop()


def _while(machine: Machine, statement: ast.While) -> None:
    value = truth_of(machine, statement.test)
    _, no, _ = machine.decide(value)
    start = machine.mask
    machine.mask &= ~no
    if machine.mask:
        around = LoopAround(statement, machine.frame.module, value, False)
        own: OwnTest | None = None

        def turn() -> None:
            nonlocal own
            own = machine.loops[-1].bound = own_test(machine, statement.test, truth_of(machine, statement.test))
            execute(machine, statement.body)

        def own_of_any_turn() -> OwnTest | None:
            # The body may have set what the next turn tests; what is called in a condition has been run.
            calls = any(isinstance(node, ast.Call) for node in descend(statement.test))
            if own is not None or calls or not machine.mask:
                return own
            return own_test(machine, statement.test, truth_of(machine, statement.test))

        if no:
            machine.mask = machine.on(
                machine.mask, statement.test, value, lambda: _loop(machine, around, turn, [None] * len(RANKS))
            )
        else:
            machine.store.begin()
            _loop(machine, around, turn, [None] * len(RANKS), own_of_any_turn)
            if is_varying(value) and own_of_any_turn() is None:  # What it counts differs as the numbers of turns do.
                for cell in list(machine.store.latest()):
                    machine.store.write(cell, varied(machine.store.get(*cell) or NONE))
            machine.store.keep()
    machine.mask |= no & start
    execute(machine, statement.orelse)


def _loop(
    machine: Machine,
    around: LoopAround,
    turn: Callable[[], None],
    turns: Sequence[int | None] | None,
    own: Callable[[], OwnTest | None] = lambda: None,
) -> None:
    """Walk a body for any of its turns: once, or more often with what a walk changed for the next turn.

    With None for ``turns`` it is one turn, which stands for itself.
    """
    start = machine.mask
    frame, inner = LoopFrame(around), None
    for _ in range(0 if around.once else _TRIED_WALKS):
        frame = LoopFrame(around)
        inner = first_walk(machine, around.node, partial(_turn, machine, turn, frame))
        if inner is not None:
            break
    if inner is None:
        frame = LoopFrame(around)
        inner = machine.collect(partial(_turn, machine, turn, frame))
    if turns is None:
        machine.add_call(inner, in_loop=True)
    else:
        machine.add_loop(inner, turns if len(set(turns)) > 1 else [None] * len(RANKS), around.node, own())
    for written in frame.left_behind:
        machine.store.merge(written)
    machine.mask = start & ~machine.gone & ~(ended_by(inner, "return", "raise", "exit") & ~machine.mask)


def _turn(machine: Machine, turn: Callable[[], None], frame: LoopFrame) -> None:
    machine.loops.append(frame)
    try:
        turn()
    finally:
        machine.loops.pop()


def _jump(machine: Machine, statement: ast.Break | ast.Continue) -> None:
    if ends_anyway(machine, statement):
        return
    machine.jump(Jump("break" if isinstance(statement, ast.Break) else "continue"), statement)


def _return(machine: Machine, statement: ast.Return) -> None:
    value = evaluate(machine, statement.value) if statement.value is not None else NONE
    if not machine.mask:
        return
    machine.frame.results.append((machine.mask, value))
    machine.jump(Jump("return"), statement)


def _raise(machine: Machine, statement: ast.Raise) -> None:
    raised = statement.exc
    if raised is not None and last_name(getattr(raised, "func", raised)) == "SystemExit":
        given = raised.args if isinstance(raised, ast.Call) else []
        code = constant(evaluate(machine, given[0])) if given else 0
        machine.leave_program(statement, raising=code not in (0, None))
        return
    if raised is not None:
        evaluate(machine, raised)
    machine.leave_program(statement, raising=True)


def _try(machine: Machine, statement: ast.Try) -> None:
    def body() -> None:
        execute(machine, statement.body)
        execute(machine, statement.orelse)

    # What Ctrl-C does is no part of a job's course, and hides nothing of it.
    handlers = [one for one in statement.handlers if one.type is None or last_name(one.type) != "KeyboardInterrupt"]

    def guarded() -> None:
        arms = [body, *(lambda handler=handler: _handler(machine, handler) for handler in handlers)]
        machine.trying += 1
        machine.fork(arms)
        machine.trying -= 1

    run = guarded if handlers else body
    if statement.finalbody:
        _finally(machine, run, lambda: execute(machine, statement.finalbody))
    else:
        run()


def _handler(machine: Machine, handler: ast.ExceptHandler) -> None:
    if handler.name:
        machine.assign(machine.frame.scope, handler.name, Unknown(varying=True))
    execute(machine, handler.body)


def _enter(machine: Machine, statement: ast.With | ast.AsyncWith, items: list[ast.withitem]) -> None:
    if not items:
        execute(machine, statement.body)
        return
    item, rest = items[0], items[1:]
    function = is_context_manager(machine, item.context_expr)
    if function is not None:
        jumps: list[Jump | None] = [None] * len(RANKS)

        def on_yield(value: Value) -> None:
            here = machine.mask
            if item.optional_vars is not None:
                assign_to(machine, item.optional_vars, value)
            inner = machine.collect(lambda: _enter(machine, statement, rest))
            for rank, items in enumerate(inner):
                if here & ~machine.mask & ~machine.gone & 1 << rank and items and isinstance(items[-1], Jump):
                    jumps[rank] = items[-1]
            machine.add_call(inner)
            machine.mask = here & ~machine.gone

        function(on_yield)
        for rank, jump in enumerate(jumps):
            if jump is not None and machine.mask >> rank & 1:
                machine.sinks[rank].append(jump)
                machine.mask &= ~(1 << rank)
        return
    value = evaluate(machine, item.context_expr)
    enter, leave = (_method(machine, value, name) for name in ("enter", "exit"))
    if enter is not None:
        entered = machine.apply(item.context_expr, enter)
    else:
        entered = derived((value,)) if isinstance(value, (BoundMethod, External)) else value
    if item.optional_vars is not None:
        assign_to(machine, item.optional_vars, entered)

    def body() -> None:
        gradients, synchronising = machine.gradients, machine.synchronising
        machine.gradients = gradients and value != NO_GRADIENTS
        machine.synchronising = synchronising and value != NO_SYNC
        machine.contexts.append(ContextAround(item.context_expr, machine.frame.module, value))
        try:
            _enter(machine, statement, rest)
        finally:
            machine.contexts.pop()
        machine.gradients, machine.synchronising = gradients, synchronising

    if leave is None:
        body()
    else:

        def last() -> None:
            machine.apply(item.context_expr, leave, Arguments((NONE,) * 3))

        _finally(machine, body, last)


def _method(machine: Machine, value: Value, name: str) -> Function | None:
    """Return a method of an object of the project by which a ``with`` statement begins or ends."""
    if not isinstance(value, Instance):
        return None
    found = class_attribute(machine, value.cls, f"__{name}__") or class_attribute(machine, value.cls, f"__a{name}__")
    return bound_to(found, value) if isinstance(found, Function) else None


def _finally(machine: Machine, body: Callable[[], None], last: Callable[[], None]) -> None:
    """Run a body, and what every rank runs on its way out of it, by whichever jump."""
    start, gone = machine.mask, machine.gone
    inner = machine.collect(body)
    after, machine.mask = machine.mask, start & ~(machine.gone & ~gone)
    ended = machine.collect(last)
    machine.mask &= after
    previous: tuple[list[Item], list[Item]] | None = None
    left: list[Item] = []
    for sink, items, more in zip(machine.sinks, inner, ended, strict=True):
        if (items, more) != previous:  # Ranks that do the same share it.
            previous = items, more
            left = before_jumps(items, more) if more else items
            left += () if left and isinstance(left[-1], Jump) else more
        sink.extend(left)


def _define(machine: Machine, statement: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    function: Value = Function(statement, machine.frame.module.name, machine.frame.scope)
    for decorator in reversed(statement.decorator_list):
        function = decorated(machine, decorator, function)
    machine.assign(machine.frame.scope, statement.name, function)


def _define_class(machine: Machine, statement: ast.ClassDef) -> None:
    scope = machine.number()
    cls = ProjectClass(statement, machine.frame.module.name, scope)
    for base in statement.bases:
        evaluate(machine, base)
    run_class_body(machine, statement, scope)
    for decorator in reversed(statement.decorator_list):
        maker = decorator.func if isinstance(decorator, ast.Call) else decorator
        if isinstance(evaluate(machine, maker), Function):
            decorated(machine, decorator, cls)  # Which mostly enters it into a registry.
    machine.assign(machine.frame.scope, statement.name, cls)


def _delete(machine: Machine, statement: ast.Delete) -> None:
    for target in statement.targets:
        if isinstance(target, ast.Name):
            machine.assign(scope_of(machine, target.id), target.id, UNIFORM)


def _assert(machine: Machine, statement: ast.Assert) -> None:
    evaluate(machine, statement.test)
    parts = statement.test.values if isinstance(statement.test, ast.BoolOp) else [statement.test]
    if not (isinstance(statement.test, ast.BoolOp) and isinstance(statement.test.op, ast.Or)):
        denied = (part.operand for part in parts if isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Not))
        names = (last_name(part) for part in denied)
        if any(_HAS_RANKS.search(name) or name in machine.mode_flags for name in names):
            machine.leave_program(statement, raising=True)  # What is read is a job with ranks, which ends here.


def _match(machine: Machine, statement: ast.Match) -> None:
    subject = evaluate(machine, statement.subject)

    def case(index: int) -> None:
        if index == len(statement.cases):
            return
        entry = statement.cases[index]
        value = _matches(subject, entry)
        for name in _captured(entry.pattern):
            machine.assign(machine.frame.scope, name, derived((subject,)))
        machine.split(statement.subject, value, lambda: execute(machine, entry.body), lambda: case(index + 1))

    case(0)


def _matches(subject: Value, case: ast.match_case) -> Value:
    pattern = case.pattern
    if case.guard is not None:
        return derived((subject,))
    if isinstance(pattern, ast.MatchAs) and pattern.pattern is None:
        return Const(True)
    literals = pattern.patterns if isinstance(pattern, ast.MatchOr) else [pattern]
    wanted: list[object] = []
    for literal in literals:
        if isinstance(literal, ast.MatchValue) and isinstance(literal.value, ast.Constant):
            wanted.append(literal.value.value)
        elif isinstance(literal, ast.MatchSingleton):
            wanted.append(literal.value)
        else:
            return derived((subject,))
    return by_rank(
        lambda value: Const(value.value in wanted) if isinstance(value, Const) else derived((value,)), subject
    )


def _captured(pattern: ast.pattern) -> list[str]:
    names = [getattr(node, "name", None) for node in descend(pattern)]
    return [name for name in names if isinstance(name, str)]


_HANDLERS: dict[type[ast.stmt], Callable[..., object]] = {
    ast.Expr: lambda machine, statement: evaluate(machine, statement.value),
    ast.Assign: _assign,
    ast.AnnAssign: _annotated,
    ast.AugAssign: _augmented,
    ast.If: _if,
    ast.For: _for,
    ast.AsyncFor: _for,
    ast.While: _while,
    ast.Break: _jump,
    ast.Continue: _jump,
    ast.Return: _return,
    ast.Raise: _raise,
    ast.Try: _try,
    **dict.fromkeys((ast.With, ast.AsyncWith), lambda machine, statement: _enter(machine, statement, statement.items)),
    ast.FunctionDef: _define,
    ast.AsyncFunctionDef: _define,
    ast.ClassDef: _define_class,
    ast.Global: lambda machine, statement: machine.frame.globals.update(statement.names),
    ast.Nonlocal: lambda machine, statement: machine.frame.nonlocals.update(statement.names),
    ast.Import: run_import,
    ast.ImportFrom: run_import,
    ast.Delete: _delete,
    ast.Assert: _assert,
    ast.Match: _match,
}
if hasattr(ast, "TryStar"):
    _HANDLERS[ast.TryStar] = _try
