"""What loops and comprehensions go over, and the first walk of a body, which shows what its next turns may find."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import count, zip_longest

from ddpdoctor.source.events import OwnTest, Sinks
from ddpdoctor.source.interpreter.assignment import OF_PROJECT, assign_to, columns_of, item_at, item_of, known_items
from ddpdoctor.source.interpreter.attributes import bound_to, class_attribute, items_of
from ddpdoctor.source.interpreter.calls import call_function
from ddpdoctor.source.interpreter.scopes import CallFrame, Cell
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    ALL_RANKS,
    OWN_ROWS,
    RANKS,
    UNIFORM,
    Arguments,
    Const,
    DictValue,
    Function,
    Instance,
    PerRank,
    SequenceValue,
    TensorSize,
    Value,
    by_rank,
    constant,
    derived,
    join,
    on_rank,
    per_rank,
    tagged,
)
from ddpdoctor.source.ranks.data_partitions import filtered
from ddpdoctor.source.ranks.rank_local_values import own_test, with_keys
from ddpdoctor.source.script.module import deep_recursion, descend, descend_outside, last_name

MAXIMUM_PHASES = 4
# Functions that make no object.
_READING = frozenset({"int", "str", "float", "get", "getenv"})


def iterated(machine: Machine, iterable: Value) -> tuple[Value, list[int | None], int]:
    """Return an item that stands for any turn, the turns by rank where known, and the mask of the ranks with none."""
    entries = [on_rank(iterable, rank) for rank in RANKS]
    turns = [len(one.values) if isinstance(one, SequenceValue) and not one.open else None for one in entries]
    empty = sum(1 << rank for rank, number in enumerate(turns) if number == 0)
    if isinstance(iterable, PerRank) and len(set(turns)) > 1 and any(lanes := _own_lanes(iterable)):
        # At which of them another rank is in the same turn is not known, nor how often it comes to one: any of all.
        anything = SequenceValue(tuple(dict.fromkeys(item for lane in lanes for item in lane)))
        return item_of(anything), [None] * len(RANKS), empty
    return by_rank(item_of, iterable), turns, empty


def phases(statement: ast.For | ast.AsyncFor, iterable: Value) -> list[tuple[Value, int]]:
    """Return the turns of a loop like ``for phase in ("train", "val"):``, which trains in one and not in the next.

    Each with the mask of the ranks that make it. Its body asks which turn it is, and has a loop of its own. One walk
    for any turn could decide none of these tests. The turns may be those of ``enumerate``, of ``zip``, or of rows that
    are written out. So are the turns over functions or objects that ranks have in other orders, or others of them, or
    more.
    """
    if isinstance(iterable, PerRank):
        return _own_turns(statement, iterable)
    items = known_items(iterable)
    named = _named_constants(statement.target, items)
    if not 1 < len(items) <= MAXIMUM_PHASES or not named or _is_left_early(statement.body):
        return []
    inside = [node for part in statement.body for node in descend(part)]
    asks = any(isinstance(node, (ast.Compare, ast.If, ast.IfExp)) and _asks(node, named) for node in inside)
    has_loop = any(isinstance(node, (ast.For, ast.While)) for node in inside)
    stored = (node for node in inside if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store))
    keys = any(_is_name(node.slice, name) for node in stored for name in named)
    return [(item, ALL_RANKS) for item in items] if (asks and has_loop) or keys else []


def _named_constants(target: ast.expr, items: Sequence[Value]) -> set[str]:
    """Return the variables of a loop that get a constant in each of its turns."""
    if isinstance(target, ast.Name):
        return {target.id} if all(isinstance(item, Const) for item in items) else set()
    pairs = zip(getattr(target, "elts", ()), columns_of(items), strict=False)
    return {name for part, column in pairs for name in _named_constants(part, column)}


def _asks(node: ast.Compare | ast.If | ast.IfExp, names: Set[str]) -> bool:
    tested = node.left if isinstance(node, ast.Compare) else node.test
    return any(_is_name(tested, name) for name in names)


def _own_turns(statement: ast.For | ast.AsyncFor, iterable: PerRank) -> list[tuple[Value, int]]:
    lanes = _own_lanes(iterable)
    if not max(map(len, lanes), default=0) > 1 or _is_left_early(statement.body):
        return []
    masks = (sum(1 << rank for rank, lane in enumerate(lanes) if number < len(lane)) for number in count())
    columns = zip_longest(*lanes, fillvalue=UNIFORM)
    return [(per_rank(column, iterable.guessed), mask) for column, mask in zip(columns, masks, strict=False)]


def _own_lanes(iterable: PerRank) -> list[tuple[Value, ...]]:
    """Return the functions or objects of the project that each rank goes through, where all of them are known."""
    known = (one for one in iterable.values if known_items(one) or one == SequenceValue(()))
    lanes = [one.values for one in known if isinstance(one, SequenceValue)]
    items = [item for lane in lanes for item in lane]
    parts = (part for item in items for part in (item, *(item.values if isinstance(item, SequenceValue) else ())))
    return lanes if len(lanes) == len(RANKS) and any(isinstance(part, OF_PROJECT) for part in parts) else []


def _is_left_early(body: Sequence[ast.stmt]) -> bool:
    """Return whether a ``break`` ends the loop around some statements."""
    closed = {ast.For, ast.While, ast.AsyncFor, ast.FunctionDef}
    return any(isinstance(node, ast.Break) for node in descend_outside(ast.Module(list(body), []), closed))


def opened(machine: Machine, node: ast.expr) -> Value:
    """Return what a loop goes over: of an object of the project, what its ``__iter__`` gives."""
    value = machine.evaluate(node)
    if isinstance(value, DictValue) and value.entries:
        return SequenceValue(tuple(Const(key) for key, _ in value.entries))
    return items_of(machine, node, value)


def item_aside(machine: Machine, dataset: Instance) -> Value:
    """Return what a data set of the project gives for any index or turn, by its own methods; nothing of it is kept."""
    known = machine.items_aside.get(dataset.number)
    if known is None:
        known = machine.items_aside[dataset.number] = _item_aside(machine, dataset)
    return known


def _item_aside(machine: Machine, dataset: Instance) -> Value:
    turns, item = (class_attribute(machine, dataset.cls, name) for name in ("__iter__", "__getitem__"))
    method = turns if isinstance(turns, Function) else item
    module = machine.script.module(method.module) if isinstance(method, Function) else None
    if not isinstance(method, Function) or module is None:
        return UNIFORM
    found: list[Value] = []

    def give() -> None:
        given = call_function(machine, method.node, bound_to(method, dataset), Arguments([UNIFORM] * (method is item)))
        found.append(given if method is item else iterated(machine, given)[0])

    kept = machine.mask, machine.quiet, dict(machine.events), len(machine.exits), len(machine.own_raises)
    machine.mask, machine.quiet, machine.aside = ALL_RANKS, True, True
    machine.frames.append(CallFrame("", module, machine.scope_modules[machine.script.entry.name], ()))
    machine.store.begin()
    try:
        with deep_recursion():
            machine.collect_safely(give, method.node, lambda: dataset.cls.node.name)
    finally:
        machine.store.undo()
        machine.frames.pop()
        machine.mask, machine.quiet, machine.events = kept[:3]
        machine.aside = False
        del machine.exits[kept[3] :], machine.own_raises[kept[4] :]
    return found[0] if found else UNIFORM


def comprehension(machine: Machine, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> Value:
    """Return the list, set or generator of a comprehension, with any number of items where they are not known."""
    turns = _turns_of(machine, node.generators, node.elt)
    if turns:
        return SequenceValue(tuple(_each_turn(machine, node.generators[0], turns, node.elt)))
    value = _in_generators(machine, node.generators, lambda: machine.evaluate(node.elt))
    return SequenceValue((filtered(machine, node, node.generators[0].ifs, value),), open=True)


def dict_comprehension(machine: Machine, node: ast.DictComp) -> Value:
    """Return the dict of a comprehension over a literal list, ``{name: os.environ[name] for name in ("RANK", ...)}``.

    Of another one the keys are not known: reading it gives its values.
    """
    turns = _turns_of(machine, node.generators, node.value)
    pairs = ast.copy_location(ast.Tuple([node.key, node.value], ast.Load()), node)
    items = list(_each_turn(machine, node.generators[0], turns, pairs))
    entries = {constant(item_at(item, 0)): item_at(item, 1) for item in items}
    if items:
        known = all(isinstance(key, (str, int)) for key in entries)
        return DictValue(tuple(entries.items())) if known else derived(entries.values())

    def pair() -> Value:
        key = machine.evaluate(node.key)
        return with_keys(machine.evaluate(node.value), key)

    return derived((_in_generators(machine, node.generators, pair),))


def _turns_of(machine: Machine, generators: list[ast.comprehension], result: ast.expr) -> tuple[Value, ...]:
    """Return the turns of a comprehension over a few constants, and of one that calls something over fewer."""
    generator, *others = generators
    if others or generator.ifs or not isinstance(generator.iter, (ast.Tuple, ast.List, ast.Name)):
        return ()
    turns = known_items(machine.evaluate(generator.iter))
    calls = (inner for inner in descend(result) if isinstance(inner, ast.Call))
    few = len(turns) <= MAXIMUM_PHASES or all(last_name(call.func) in _READING for call in calls)
    return turns if few and all(isinstance(item, Const) for item in turns) else ()


def _each_turn(
    machine: Machine, generator: ast.comprehension, turns: Sequence[Value], result: ast.expr
) -> Iterator[Value]:
    """Yield what a comprehension gives in each of its turns; what a call makes in each is an object of its own."""
    for number, item in enumerate(turns):
        machine.phases.append(number)
        try:
            yield _in_generators(machine, [generator], lambda: machine.evaluate(result), item)
        finally:
            machine.phases.pop()


def _in_generators(
    machine: Machine, generators: list[ast.comprehension], result: Callable[[], Value], one: Value | None = None
) -> Value:
    """Evaluate a comprehension's result once, as the body of a loop, for one item or what stands for any.

    Its variables are its own: what the function has by their names is there again after it.
    """
    found: list[Value] = []
    own: list[OwnTest | None] = []
    targets = [node for generator in generators for node in ast.walk(generator.target) if isinstance(node, ast.Name)]
    hidden = {(machine.frame.scope, node.id): machine.store.get(machine.frame.scope, node.id) for node in targets}

    def turn() -> None:
        for number, generator in enumerate(generators):
            item = iterated(machine, opened(machine, generator.iter))[0] if one is None else one
            if number == 0:
                machine.store.forget(hidden)
            assign_to(machine, generator.target, item)
            for condition in generator.ifs:
                own.append(own_test(machine, condition, machine.evaluate(condition)))
        found.append(tagged(result(), frozenset({OWN_ROWS})) if any(own) else result())

    machine.add_loop(machine.collect(turn), [None if one is None else 1] * len(RANKS), generators[0].iter)
    machine.store.put({cell: value for cell, value in hidden.items() if value is not None})
    return found[0]


Turn = Callable[[], None]


def first_walk(machine: Machine, loop: ast.AST, turn: Turn) -> Sinks | None:
    """Walk a body as its first turn runs it; return what the ranks did in it, when any other turn does the same.

    None when a later turn may do something else, because it finds another value in a variable: then everything is as
    before the walk, and the variables hold what a first or a later turn may find in them. What they held after an
    earlier walk of the same loop is assumed from the start, so that this walk is mostly the last one. Loops inside are
    walked once: when one changes something, this walk is taken back.
    """
    if machine.tentative:
        return _inner_walk(machine, loop, turn)
    start, gone, raised, frame = machine.mask, machine.gone, machine.raised, machine.frame
    returned, left = len(frame.results), len(frame.left_behind)
    exits, own_raises, events = len(machine.exits), len(machine.own_raises), dict(machine.events)
    number, outer_missed = machine.number(), machine.missed
    known = machine.changing.get((loop, frame.origins))
    if known is not None:
        machine.store.merge({(frame.scope if here else owner, name): v for (here, owner, name), v in known.items()})
    machine.missed = set()
    machine.tentative = known is None
    machine.quiet = known is None and _counts(machine, loop)
    machine.store.begin()
    machine.effort.trials += 1
    try:
        inner = machine.collect(turn)
    finally:
        machine.effort.trials -= 1
    taken_back, machine.quiet, machine.tentative = machine.quiet, False, False
    missed, machine.missed = machine.missed, outer_missed | machine.missed
    if not taken_back and _finds_the_same(machine, loop, missed, number):
        machine.store.keep()
        return inner
    written = machine.store.undo()
    _remember(machine, loop, written)
    machine.mask, machine.gone, machine.raised = start, gone, raised
    del frame.results[returned:], frame.left_behind[left:], machine.exits[exits:], machine.own_raises[own_raises:]
    machine.events = events
    machine.effort.take_back()
    machine.store.merge({cell: _of_any_turn(machine.store.get(*cell), value) for cell, value in written.items()})
    return None


def _of_any_turn(before: Value | None, after: Value) -> Value:
    """Return what a turn finds where the first changed a known value on some ranks: any value there, else the same.

    Otherwise the value that depends on the rank would win, and a count be taken for its value after one turn.
    """
    if not isinstance(before, Const) or not isinstance(after, PerRank) or after.guessed:
        return after
    return per_rank([join(before, value, True) for value in after.values])


def _inner_walk(machine: Machine, loop: ast.AST, turn: Turn) -> Sinks:
    number, outer_missed = machine.number(), machine.missed
    machine.missed = set()
    machine.store.begin()
    inner = machine.collect(turn)
    missed, machine.missed = machine.missed, outer_missed | machine.missed
    key = (loop, machine.frame.origins)
    if key not in machine.changing and not _finds_the_same(machine, loop, missed, number):
        written = ((cell, machine.store.get(*cell)) for cell in machine.store.latest())
        _remember(machine, loop, {cell: value for cell, value in written if value is not None})
    machine.quiet = machine.quiet or key in machine.changing
    machine.store.keep()
    return inner


def _remember(machine: Machine, loop: ast.AST, written: Mapping[Cell, Value]) -> None:
    frame = machine.frame
    found = {(owner == frame.scope, owner, name): value for (owner, name), value in written.items()}
    machine.changing[loop, frame.origins] = found


def _counts(machine: Machine, loop: ast.AST) -> bool:
    """Return whether a loop counts or sums up in a variable of known value: its next turn finds another one."""
    first, last, scope = loop.lineno, loop.end_lineno or 0, machine.frame.scope  # type: ignore[attr-defined]
    return any(
        isinstance(node.target, ast.Name)
        and first < node.lineno <= last
        and isinstance(machine.store.get(scope, node.target.id), (Const, TensorSize))
        for node in machine.frame.module.index.of(ast.AugAssign)
    )


def _finds_the_same(machine: Machine, loop: ast.AST, missed: set[str], number: int) -> bool:
    """Return whether a turn finds in every variable what the turn before found in it, or writes it before it reads it.

    ``missed`` are the names that it looked up in vain, and ``number`` is smaller than the numbers of what it made.
    """
    scopes = {frame.scope for frame in machine.frames}
    for (owner, name), old in machine.store.latest().items():
        value = machine.store.get(owner, name)
        if old is not None:
            same = value is None or value is old or join(old, value) == old
            if not same and (owner != machine.frame.scope or _may_read_turn_before(machine, loop, name)):
                return False
        elif owner > number and owner in machine.outer_scopes:
            continue  # A variable of a function that was called: it ended with the call.
        elif owner in scopes:
            if name in missed:
                return False
        elif f".{name}" in missed or (owner < number and owner not in machine.events):
            return False  # Attributes of library objects are only read by their names, which would have been missed.
    return True


_LEAVING = (ast.Break, ast.Continue, ast.Return, ast.Raise)


def _may_read_turn_before(machine: Machine, loop: ast.AST, name: str) -> bool:
    """Return whether a turn may read what the turn before left in a variable of the function around the loop."""
    if isinstance(loop, ast.For) and any(_is_name(node, name) for node in descend(loop.target)):
        return False
    function = machine.frame.owner
    if function is None or _holds_functions(machine, function.node):
        return True
    if not any(_reads(node, name) for node in descend(loop)):
        return False
    for statement in loop.body:  # type: ignore[attr-defined]
        if isinstance(statement, ast.Assign) and any(_is_name(target, name) for target in statement.targets):
            return any(_is_name(node, name) for node in descend(statement.value))
        if any(_reads(node, name) or isinstance(node, _LEAVING) for node in descend(statement)):
            return True
    return True


def _holds_functions(machine: Machine, function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> bool:
    """Return whether functions are made in a function: they may read its variables whenever they are called."""
    index, first, last = machine.frame.module.index, function.lineno, function.end_lineno or 0
    made: tuple[ast.stmt | ast.expr, ...]
    made = (*index.of(ast.FunctionDef), *index.of(ast.Lambda), *index.of(ast.AsyncFunctionDef))
    return any(first <= node.lineno <= last and node is not function for node in made)


def _reads(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.AugAssign):
        return _is_name(node.target, name)
    return isinstance(node, ast.Name) and node.id == name and node.ctx.__class__ is ast.Load


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def ends_anyway(machine: Machine, leaving: ast.Break | ast.Continue) -> bool:
    """Return whether a loop comes to an end where it is left: ``if epoch == epochs - 1: break`` as its last statement.

    The loop has to count up to that number: ``for epoch in range(epochs)``.
    """
    around: ast.AST = leaving
    tests: list[ast.expr] = []
    for outer in machine.frame.module.ancestors(leaving):
        if isinstance(outer, ast.If) and outer.body[-1] is around:
            tests.append(outer.test)
        elif not isinstance(outer, ast.For):
            return False
        else:
            last = outer.body[-1] is around and not outer.orelse
            return last and isinstance(leaving, ast.Break) and any(_is_last_turn(outer, test) for test in tests)
        around = outer
    return False


def _is_last_turn(loop: ast.For, test: ast.expr) -> bool:
    """Return whether a test holds in the last turn alone; of ``a and b`` one part is enough."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(_is_last_turn(loop, part) for part in test.values)
    turns = loop.iter
    if not (isinstance(turns, ast.Call) and last_name(turns.func) == "range" and 0 < len(turns.args) < 3):
        return False
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], (ast.Eq, ast.GtE)) or len(test.ops) > 1:
        return False
    counted, bound = ast.unparse(loop.target), ast.unparse(turns.args[-1])
    compared = ast.unparse(test.left), ast.unparse(test.comparators[0])
    return compared in {(counted, f"{bound} - 1"), (f"{counted} + 1", bound)}
