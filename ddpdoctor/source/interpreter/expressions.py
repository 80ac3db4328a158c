"""Evaluates expressions on the four ranks."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from functools import partial, reduce

from ddpdoctor.source.interpreter.assignment import (
    has_own_keys,
    is_mask,
    item_at,
    one_of_callables,
    overwrite,
    scope_of,
)
from ddpdoctor.source.interpreter.attributes import (
    attribute_of,
    guess_from_name,
    named_member,
    owns_attributes,
    text_of,
)
from ddpdoctor.source.interpreter.calls import call, context_function
from ddpdoctor.source.interpreter.loops import comprehension, dict_comprehension, iterated
from ddpdoctor.source.interpreter.operators import binary, compare, formatted, negated, of_four, unary
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    ALL_RANKS,
    FALSE,
    MEMBERS,
    OPAQUE,
    OWN_LENGTH,
    RANKS,
    TRUE,
    UNIFORM,
    BoundMethod,
    Const,
    DictValue,
    External,
    ExternalObject,
    Function,
    Instance,
    OneOf,
    PerRank,
    ProjectModule,
    SequenceValue,
    Unknown,
    Value,
    as_filled,
    as_made,
    by_rank,
    constant,
    derived,
    is_guessed,
    is_object,
    is_open,
    is_too_large,
    is_varying,
    join,
    kinds_of_rank,
    never_none,
    on_rank,
    only_of_files,
    per_rank,
    stamped,
    tagged,
    tags_of,
    truth,
)
from ddpdoctor.source.libraries.sharding import part_of_mesh
from ddpdoctor.source.ranks.data_partitions import SHARE, given_in_turn, picked, sliced
from ddpdoctor.source.ranks.rank_local_values import FORM, chosen_by, decided, extent_of
from ddpdoctor.source.ranks.ranks import GLOBAL_RANK, LOCAL_RANK, exact_per_rank, is_set, variable
from ddpdoctor.source.script.module import descend, last_name
from ddpdoctor.source.torch_model.recorded_calls import note_absent, note_attribute, note_unassigned
from ddpdoctor.source.vocabulary import DISTRIBUTION_ATTRIBUTES, DISTRIBUTION_NAMES

ENVIRONMENT = External("os.environ")
MODULES = External("sys.modules")


def evaluate(machine: Machine, node: ast.expr) -> Value:
    """Evaluate an expression, and run what it calls."""
    machine.steps += 1
    handler = _HANDLERS.get(node.__class__)
    if handler is not None:
        return handler(machine, node)
    return derived([evaluate(machine, child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)])


def truth_of(machine: Machine, node: ast.expr) -> Value:
    """Return the value of a condition, reduced to its truth on each rank."""
    return by_rank(_truth_value, evaluate(machine, node))


def is_context_manager(machine: Machine, node: ast.expr) -> Callable[[Callable[[Value], None]], None] | None:
    """Return a function that runs the generator of a ``with`` item around a body; None without one of the project."""
    if not isinstance(node, ast.Call):
        return None
    function = evaluate(machine, node.func) if isinstance(node.func, (ast.Name, ast.Attribute)) else UNIFORM
    return context_function(machine, node, function)


# Masks of the ranks of one number on all nodes. What one rank alone, or all others, have made differs from what is
# outside, and a choice by it is theirs; these do the same on each node, whatever the rest of it does.
_ONE_OF_EACH_NODE = frozenset(
    sum(1 << rank for rank in RANKS if LOCAL_RANK[rank] == local) for local in set(LOCAL_RANK)
)


def _name(machine: Machine, node: ast.Name) -> Value:
    name = node.id
    frame = machine.frames[-1]
    names = machine.store.owners.get(frame.scope)
    known = names.get(name) if names is not None and name not in frame.globals else None
    value = known if known is not None else machine.lookup(name)
    kind = value.__class__
    if name in machine.store.partly:
        note_unassigned(machine, node, machine.scope_that_holds(name), name)
    if isinstance(value, PerRank) and machine.mask != ALL_RANKS:
        filled = as_filled(value, machine.mask)
        each_node = filled is value and machine.mask in _ONE_OF_EACH_NODE
        return as_made(value, machine.mask) if each_node else filled
    return guess_from_name(machine, name, value) if kind is Unknown or kind is BoundMethod else value


def _attribute(machine: Machine, node: ast.Attribute) -> Value:
    inner, name = node.value, node.attr
    if inner.__class__ is ast.Name:  # Most are: one call less.
        machine.steps += 1
        owner = _name(machine, inner)
    else:
        owner = evaluate(machine, inner)
    kind = owner.__class__
    if kind is PerRank:
        note_absent(machine, inner, owner)
    elif isinstance(owner, Instance):
        if name in machine.store.partly and owns_attributes(machine, owner.cls, name):
            note_unassigned(machine, node, owner.number, name)
    elif kind is ExternalObject:
        note_attribute(machine, node, name, owner)
    elif kind is Unknown and name == "shape" and (extent := extent_of(owner)) is not None:
        return extent
    elif kind is Unknown and name in FORM:
        return UNIFORM
    value = attribute_of(machine, owner, name)
    kind = value.__class__
    if isinstance(value, PerRank) and machine.mask != ALL_RANKS:
        return as_filled(value, machine.mask)
    guesses = kind is Unknown or kind is BoundMethod or kind is OneOf
    return guess_from_name(machine, name, value, of_object=True) if guesses else value


def _binary(machine: Machine, node: ast.BinOp) -> Value:
    left, right = evaluate(machine, node.left), evaluate(machine, node.right)
    if left.__class__ is not PerRank and right.__class__ is not PerRank:
        return never_none(binary(node.op, left, right))
    note_absent(machine, node.left, left)
    note_absent(machine, node.right, right)
    if isinstance(node.op, ast.Add) and _is_global_rank(machine, node, left, right):
        return exact_per_rank(GLOBAL_RANK)
    if isinstance(node.op, (ast.Add, ast.Sub, ast.Mod)) or (isinstance(node.op, ast.Mult) and not machine.spawns):
        left, right = of_four(left), of_four(right)
    result = by_rank(lambda one, other: binary(node.op, one, other), left, right)
    # What is made of a rank is known before something unknown is added: `args.seed + local_rank`.
    return tagged(result, kinds_of_rank(left, right)) if result.__class__ is Unknown else result


def _is_global_rank(machine: Machine, node: ast.BinOp, left: Value, right: Value) -> bool:
    """Return whether ``rank = number_of_node * gpus + index`` makes the global rank, as its name says.

    The number of the node is not known, or was called a rank itself until then, as in PyTorch's example of ImageNet.
    """
    around = machine.frame.module.parents.get(node)
    targets = around.targets if isinstance(around, ast.Assign) else ()
    named = any(map(_names_rank, targets)) or (isinstance(around, ast.keyword) and around.arg == "rank")
    return any(
        # ``rank += index``, or ``rank = number_of_node * gpus + index``
        ((isinstance(nodes, Unknown) and _names_rank(first)) or (named and _is_product(first)))
        and not isinstance(nodes, Const)
        and isinstance(index, PerRank)
        and not index.guessed
        and tuple(map(constant, index.values)) in (LOCAL_RANK, GLOBAL_RANK)
        for first, nodes, index in ((node.left, left, right), (node.right, right, left))
    )


def _names_rank(node: ast.expr) -> bool:
    return "rank" in last_name(node) and "local" not in last_name(node)


def _is_product(node: ast.expr) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)


def _unary(machine: Machine, node: ast.UnaryOp) -> Value:
    operand = evaluate(machine, node.operand)
    if isinstance(node.op, ast.Not):
        return by_rank(negated, operand)
    return by_rank(lambda value: unary(node.op, value), operand)


def _compare(machine: Machine, node: ast.Compare) -> Value:
    operands = [evaluate(machine, node.left), *(evaluate(machine, right) for right in node.comparators)]
    if len(operands) == 2 and operands[1] == ENVIRONMENT and isinstance(node.ops[0], (ast.In, ast.NotIn)):
        there = is_set(machine, constant(operands[0]))
        return by_rank(negated, there) if isinstance(node.ops[0], ast.NotIn) else there
    if not any(isinstance(operand, PerRank) for operand in operands):
        return compare(node.ops, operands)
    return by_rank(lambda *lanes: compare(node.ops, lanes), *map(of_four, operands))


def _junction(machine: Machine, operator: ast.boolop, operands: Sequence[ast.expr]) -> Value:
    first = evaluate(machine, operands[0])
    if len(operands) == 1:
        return first
    stops = isinstance(operator, ast.Or)
    result: list[Value] = [on_rank(first, rank) for rank in RANKS]
    rest: list[Value] = []

    def run_rest() -> None:
        rest.append(_junction(machine, operator, operands[1:]))

    arms: tuple[Callable[[], None], Callable[[], None]] = (run_rest, lambda: None)
    machine.split(operands[0], by_rank(_truth_value, first), *(arms[::-1] if stops else arms))
    if not rest:
        return first
    right = reduce(join, rest)
    for rank in RANKS:
        outcome = truth(result[rank])
        if outcome is None:
            result[rank] = _either(result[rank], on_rank(right, rank), stops)
        elif outcome is not stops:
            result[rank] = on_rank(right, rank)
    return per_rank(result, is_guessed(first, right))


def _either(left: Value, right: Value, stops: bool) -> Value:
    """Return ``left or right`` (``stops``) or ``left and right`` when the truth of ``left`` is not known."""
    outcome = truth(right)
    if outcome is stops and isinstance(right, Const) and isinstance(right.value, bool):
        return right
    if isinstance(right, Const) and isinstance(right.value, bool):
        return derived((left,))
    if isinstance(left, OneOf):
        kept = [option for option in left.options if truth(option) in (None, stops)]
        left = OneOf(tuple(kept), left.varying) if len(kept) > 1 else kept[0] if kept else right
    return join(left, right, is_varying(left))


def _truth_value(value: Value) -> Value:
    outcome = truth(value)
    return derived((value,)) if outcome is None else Const(outcome)


def _conditional(machine: Machine, node: ast.IfExp) -> Value:
    condition = truth_of(machine, node.test)
    outcomes: list[tuple[int, Value]] = []

    def arm(expression: ast.expr) -> Callable[[], None]:
        def run() -> None:
            ranks = machine.mask
            outcomes.append((ranks, evaluate(machine, expression)))

        return run

    machine.split(node.test, condition, arm(node.body), arm(node.orelse))
    by_lane: list[Value] = []
    for rank in RANKS:
        here = [on_rank(value, rank) for ranks, value in outcomes if ranks >> rank & 1]
        test = on_rank(condition, rank)
        either = partial(join, varying=is_varying(test) and not only_of_files(test))
        by_lane.append(reduce(either, here) if here else on_rank(outcomes[0][1], rank))
    guessed = is_guessed(condition, *(value for _, value in outcomes))
    first = outcomes[0][1]
    if len(outcomes) == 1 or (all(value == first for _, value in outcomes)):
        return first
    if {value for _, value in outcomes} == {Const("cuda"), Const("cpu")}:
        return Const("cuda")  # The script is read as a job on GPUs.
    if not isinstance(condition, PerRank) and not any(isinstance(value, PerRank) for _, value in outcomes):
        present = (value for rank, value in enumerate(by_lane) if machine.mask >> rank & 1)
        return decided(machine, node.test, condition, next(present, by_lane[0]))
    return per_rank(by_lane, guessed)


def _joined_string(machine: Machine, node: ast.JoinedStr) -> Value:
    parts: list[Value] = []
    plain = True
    for part in node.values:
        if isinstance(part, ast.FormattedValue):
            form = constant(evaluate(machine, part.format_spec)) if part.format_spec is not None else ""
            parts.append(stamped(text_of(machine, evaluate(machine, part.value)), "strftime", form))
            plain = plain and part.conversion == -1 and part.format_spec is None
        else:
            parts.append(evaluate(machine, part))
    made = formatted if plain else derived
    return by_rank(lambda *values: made(values), *parts) if parts else Const("")


def _items(machine: Machine, node: ast.List | ast.Tuple | ast.Set) -> Value:
    values: list[Value] = []
    for number, element in enumerate(node.elts, 1):
        if isinstance(element, ast.Starred):
            inner = evaluate(machine, element.value)
            if not isinstance(inner, SequenceValue) or inner.open:
                others = (other.value if isinstance(other, ast.Starred) else other for other in node.elts[number:])
                rest = [evaluate(machine, other) for other in others]
                return SequenceValue((derived([*values, inner, *rest]),), open=True)
            values.extend(inner.values)
        else:
            values.append(evaluate(machine, element))
    if any(isinstance(value, PerRank) for value in values):
        return per_rank(
            [SequenceValue(tuple(on_rank(value, rank) for value in values)) for rank in RANKS], is_guessed(*values)
        )
    return _bounded_literal(node, SequenceValue(tuple(values)))


def _bounded_literal(node: ast.expr, value: Value) -> Value:
    """Return a value that is written out; a table of data that is larger than any value may be is uniform, no more."""
    data = is_too_large(value) and not any(isinstance(inner, (ast.Name, ast.Call)) for inner in descend(node))
    return UNIFORM if data else value


def _dict(machine: Machine, node: ast.Dict) -> Value:
    entries: dict[object, Value] = {}
    known = True
    for key, entry in zip(node.keys, node.values, strict=True):
        value = evaluate(machine, entry)
        name = evaluate(machine, key) if key is not None else None
        if value == FALSE and isinstance(name, Const) and name.value in DISTRIBUTION_NAMES | DISTRIBUTION_ATTRIBUTES:
            value = TRUE  # A setting's default: a job with ranks is looked at.
        if key is None and isinstance(value, DictValue):
            entries.update(value.entries)
        elif isinstance(name, Const) and isinstance(name.value, (str, int, float, type(None))):
            entries[name.value] = value
        else:
            known = False
            entries[len(entries)] = value
    return _bounded_literal(node, DictValue(tuple(entries.items()))) if known else derived(entries.values())


def _subscript(machine: Machine, node: ast.Subscript) -> Value:
    container = evaluate(machine, node.value)
    note_absent(machine, node.value, container)
    if isinstance(node.slice, ast.Slice) and container.__class__ is not External:
        return sliced(machine, node, node.slice, container)
    key = evaluate(machine, node.slice)
    if isinstance(container, ExternalObject):
        if (part := part_of_mesh(machine, node, container, key)) is not None:
            return part
        made = machine.object(container)
        given = [] if made is None else made.values
        if (module := _module_in(container.name, given, constant(key))) is not None:
            return module
        if any(is_varying(one) and not only_of_files(one) for one in given):
            return Unknown(False, False, frozenset({SHARE}))  # of a file that is the rank's own, as `torch.load` gives
    if container == ENVIRONMENT:
        return by_rank(lambda name: variable(machine, constant(name)), key)
    if container == MODULES and machine.script.module(name := str(constant(key))) is not None:
        return ProjectModule(name)
    if isinstance(container, ProjectModule):  # of globals()
        if isinstance(key, Const):
            return attribute_of(machine, container, str(key.value))
        return named_member(machine, node, key, container) or derived((container, key))
    if isinstance(key, Const) and isinstance(key.value, (str, int)):
        item = item_at(container, key.value)
        if isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
            return never_none(item)
        return guess_from_name(machine, key.value, item, of_object=True) if isinstance(key.value, str) else item
    if isinstance(container, External):
        return container
    if isinstance(container, SequenceValue) and container.values and isinstance(key, PerRank):
        return by_rank(lambda one: item_at(container, constant(one)) if isinstance(one, Const) else OPAQUE, key)
    if isinstance(container, DictValue) and (kept := one_of_callables(machine, node, key, container)) is not None:
        return kept
    if isinstance(container, DictValue) and is_open(container):
        values = [value for _, value in container.entries]
        if all(map(is_object, values)):
            return reduce(join, values)
    result = derived((container, key))
    if isinstance(container, Unknown) and has_own_keys(machine, node, container, key):
        overwrite(machine, node.value, Unknown(True, False, result.tags | {MEMBERS}))  # The key is made.
    if isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
        return never_none(result)
    if is_varying(key) and isinstance(container, Unknown) and is_mask(machine, node.slice):
        return tagged(result, frozenset({OWN_LENGTH}))
    by_rank_key = isinstance(key, PerRank) and all(isinstance(entry, Const) for entry in key.values)
    return picked(machine, node, result) if by_rank_key else result


def _module_in(name: str, given: Sequence[Value], number: object) -> Value | None:
    """Return the module that a container of torch has at a place; None where that is not known."""
    listed = isinstance(given[0], SequenceValue) and not given[0].open if given else False
    held = given[0].values if listed and isinstance(given[0], SequenceValue) else given
    if name not in ("torch.nn.Sequential", "torch.nn.ModuleList") or not isinstance(number, int):
        return None
    known = all(isinstance(one, (Instance, ExternalObject)) for one in held)
    return held[number] if known and -len(held) <= number < len(held) else None


def _walrus(machine: Machine, node: ast.NamedExpr) -> Value:
    value = evaluate(machine, node.value)
    machine.assign(scope_of(machine, node.target.id), node.target.id, value)
    return value


def _yield(machine: Machine, node: ast.Yield) -> Value:
    value = evaluate(machine, node.value) if node.value is not None else Const(None)
    _give(machine, given_in_turn(machine, node, value))
    return UNIFORM


def _yield_from(machine: Machine, node: ast.YieldFrom) -> Value:
    _give(machine, iterated(machine, evaluate(machine, node.value))[0])
    return UNIFORM


def _give(machine: Machine, value: Value) -> None:
    """Pass an item of a generator to the body that it runs around, or keep it for the loop over the generator."""
    frame = machine.frame
    if frame.on_yield is not None:
        frame.on_yield(value)
        return
    if any(loop.skipped for loop in machine.loops) or any(map(is_varying, machine.deciding)):
        value = tagged(value, frozenset({SHARE}))
    if machine.own_tests:
        value = chosen_by(machine.own_tests[-1:], value)
    frame.giving += machine.loops[frame.loops_outside :]
    frame.yielded = join(frame.yielded, value)
    endless = next((loop.around for loop in machine.loops if isinstance(loop.around.node, ast.While)), None)
    if endless is not None:
        machine.cycles.update({number: endless for kind, number in tags_of(value) if kind == "batch"})


_HANDLERS: dict[type[ast.expr], Callable[..., Value]] = {
    ast.Name: _name,
    ast.Constant: lambda machine, node: Const(node.value),
    ast.Attribute: _attribute,
    ast.Call: call,
    ast.BinOp: _binary,
    ast.UnaryOp: _unary,
    ast.Compare: _compare,
    ast.BoolOp: lambda machine, node: _junction(machine, node.op, node.values),
    ast.IfExp: _conditional,
    ast.JoinedStr: _joined_string,
    ast.List: _items,
    ast.Tuple: _items,
    ast.Set: _items,
    ast.Dict: _dict,
    ast.Subscript: _subscript,
    ast.ListComp: comprehension,
    ast.SetComp: comprehension,
    ast.GeneratorExp: comprehension,
    ast.DictComp: dict_comprehension,
    ast.Lambda: lambda machine, node: Function(node, machine.frame.module.name, machine.frame.scope),
    ast.NamedExpr: _walrus,
    ast.Yield: _yield,
    ast.YieldFrom: _yield_from,
    ast.Await: lambda machine, node: evaluate(machine, node.value),
}
