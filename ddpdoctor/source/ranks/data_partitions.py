"""Parts of the data that each rank takes by arithmetic with its rank, and that need not be equal.

The walk tags what a rank took so; ``as_written`` finds the same in code that is not walked, by names.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence

from ddpdoctor.files import regex
from ddpdoctor.source.events import Part
from ddpdoctor.source.interpreter.scopes import Store
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    Arguments,
    Const,
    Instance,
    Tag,
    Unknown,
    Value,
    derived,
    is_varying,
    tagged,
    tags_of,
)
from ddpdoctor.source.ranks.ranks import rank_names
from ddpdoctor.source.script.module import Module, descend, last_name, made_from

PART = "part"
"""Kind of the tags of what a rank took for itself; the number is that of the ``Part``."""
SHARE: Tag = ("share", 0)
"""Of what a rank took for itself by its number, in whatever way: other ranks have other items."""
CUT: Tag = ("cut", 0)
"""Of what was cut to a length, or made longer by what was: it may have been made to divide evenly."""

ORDER = "order"
"""Kind of the tags of what a draw has put in an order; the number is that of the draw."""
PIECE, PIECES = "piece", "pieces"
"""Kinds of the tags of what is cut out of such: by a slice of its own, or by one of many."""

_WORLD_WORDS = frozenset(
    {"world_size", "get_world_size", "WORLD_SIZE", "world", "num_replicas", "num_ranks", "n_ranks", "nranks"}
    | {"num_processes", "nprocs", "num_gpus", "ngpus", "ws"}
)
# Kinds of the tags of what is a rank's own for another reason than its number.
_OWN = frozenset({"batch", "ddp", "clock", "files", "random", "own"})
DIVIDING = frozenset({"array_split", "tensor_split", "chunk", "split", "hsplit"})
"""Last names of functions that divide what they are given into parts."""
# Of these, the ones of which some parts are longer.
_SPLITS = frozenset({"array_split", "tensor_split", "chunk"})
# Names of numbers that are divided by the number of ranks and are no amount of data.
_NO_DATA = regex(r"batch|worker|(^|_)bs($|_)|accum|thread|cpu|gpu|device|node|(^|_)lr($|_)|seed|step", re.IGNORECASE)
# Names in a script that makes the parts equal.
EVEN = regex(r"total_size|per_rank|evenly|make_even|equali[sz]e|divisible|pad_to|padded|truncat|drop_tail")


def part_tags(value: Value) -> frozenset[int]:
    """Return the numbers of the parts that a value is, or is made of."""
    return frozenset(number for kind, number in tags_of(value) if kind == PART)


def parts_held(machine: Machine, value: Value) -> frozenset[Tag]:
    """Return the tags of the parts of the data that an object of the project keeps in its attributes."""
    if not isinstance(value, Instance):
        return frozenset()
    return frozenset(tag for one in machine.store.held(value.number) for tag in tags_of(one) if tag[0] == PART)


def sliced(machine: Machine, node: ast.Subscript, limits: ast.Slice, container: Value) -> Value:
    """Return ``data[lower:upper:step]``, marked as a part where the rank cuts it."""
    evaluate = machine.evaluate
    lower, upper, step = (
        None if limit is None else evaluate(limit) for limit in (limits.lower, limits.upper, limits.step)
    )
    bounds = [limit for limit in (lower, upper, step) if limit is not None]
    result = derived([container, *bounds], frozenset({SHARE}) if any(map(is_rank, bounds)) else frozenset())
    if any(kind == ORDER for kind, _ in result.tags):
        of_many = bool(machine.loops)
        result = derived((result,), frozenset({(PIECES if of_many else PIECE, machine.object_number(node))}))
    if limits.step is not None and step is not None:
        whole = limits.upper is None or _is_length(machine.frame.module, limits.upper)
        if whole and lower is not None and is_rank(lower) and _is_world(limits.step, step):
            divided(machine, node, lower, step)
            return result if CUT in result.tags else as_part(machine, node, result)
    if limits.upper is None or upper is None:
        return result
    kept = frozenset(tag for tag in result.tags if tag[0] != PART)
    if not is_varying(upper):
        return Unknown(result.varying, result.opaque, kept | {CUT})
    if lower is not None and is_rank(lower) and CUT not in kept and _takes_rest(machine, limits.upper):
        return as_part(machine, node, Unknown(True, False, kept), with_rest=True)
    return Unknown(result.varying, result.opaque, kept) if kept != result.tags else result


def picked(machine: Machine, node: ast.Subscript, result: Value) -> Value:
    """Return ``data[key]`` with the rank as the key: the share of the rank, and of a division into parts its part."""
    if not isinstance(result, Unknown):
        return result
    result = Unknown(result.varying, result.opaque, result.tags | {SHARE}, result.not_none)
    module, source = machine.frame.module, node.value
    if isinstance(source, ast.Call) and last_name(source.func) in {"list", "tuple"} and source.args:
        source = source.args[0]
    if isinstance(source, ast.Name):
        source = _assigned(module, source) or source
    if not isinstance(source, ast.Call) or last_name(source.func) not in _SPLITS:
        return result
    worlds = _worlds(machine.store)
    if not any(_names(argument) & worlds for argument in source.args) or CUT in result.tags:
        return result
    return as_part(machine, node, result)


def ranged(machine: Machine, node: ast.AST, arguments: Sequence[Value], result: Value) -> Value:
    """Return ``range(rank, n, world_size)`` as a part, n a length or a number; from the rank on, as a share."""
    if len(arguments) < 2 or not is_rank(arguments[0]):
        return result
    result = _shared(result)
    if len(arguments) != 3 or not isinstance(node, ast.Call) or len(node.args) != 3:
        return result
    stop = arguments[1].value if isinstance(arguments[1], Const) else None
    known = stop if isinstance(stop, int) else None
    if not _is_world(node.args[2], arguments[2]):
        return result
    if known is None and (not _is_length(machine.frame.module, node.args[1]) or _length_is_cut(machine, node.args[1])):
        return result
    divided(machine, node, arguments[0], arguments[2])
    return as_part(machine, node, derived((result,)), items=known)


def strided(machine: Machine, node: ast.AST, arguments: Sequence[Value], result: Value) -> Value:
    """Return ``itertools.islice(stream, rank, None, world_size)`` as a part; from the rank on, as a share."""
    if len(arguments) < 3 or not is_rank(arguments[1]):
        return result
    result = _shared(result)
    if len(arguments) != 4 or arguments[2] != Const(None) or not isinstance(node, ast.Call) or len(node.args) != 4:
        return result
    if not _is_world(node.args[3], arguments[3]) or CUT in tags_of(arguments[0]):
        return result
    divided(machine, node, arguments[1], arguments[3])
    return as_part(machine, node, derived((result,)))


def _shared(result: Value) -> Value:
    return tagged(result, frozenset({SHARE})) if isinstance(result, Unknown) else result


def filtered(machine: Machine, node: ast.AST, conditions: Iterable[ast.expr], item: Value) -> Value:
    """Return the items of a comprehension: a part when a condition gives every rank its turn."""
    if any(gives_turns(machine.store, condition) for condition in conditions):
        return tagged(item, frozenset({(PART, _number(machine, node, item)), SHARE}))
    return item


def _worlds(store: Store) -> frozenset[str]:
    """Return the names that stand for the number of ranks, by what the walk found in them or as they are called."""
    return _WORLD_WORDS | store.size_names


def gives_turns(store: Store, test: ast.expr) -> bool:
    """Return whether a test is ``index % world_size == rank`` or the opposite, by names."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], (ast.Eq, ast.NotEq)):
        return False
    sides = test.left, test.comparators[0]
    return any(
        isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod) and _named_so(store, other, one.right)
        for one, other in (sides, sides[::-1])
    )


def turn_taken(store: Store, module: Module, loop: ast.AST, node: ast.AST) -> ast.If | None:
    """Return the test by which a rank leaves out the turns of the others in a loop, and ``node`` with them.

    Of a loop over data, as far as it goes: a count that is no length may be a multiple of the number of ranks.
    """
    within: list[ast.AST] = [node, *module.ancestors(node)]
    if loop not in within or not isinstance(loop, (ast.For, ast.AsyncFor)):
        return None
    over = loop.iter
    if (
        isinstance(over, ast.Call)
        and last_name(over.func) == "range"
        and not any(_is_length(module, part) for part in over.args)
    ):
        return None
    inside = within[: within.index(loop)]
    for statement in loop.body:
        test = statement.test if isinstance(statement, ast.If) and not statement.orelse else None
        if not isinstance(statement, ast.If) or not isinstance(test, ast.Compare) or not gives_turns(store, test):
            if statement in inside:
                return None
            continue
        if isinstance(test.ops[0], ast.Eq):
            return statement if statement in inside else None
        return statement if len(statement.body) == 1 and isinstance(statement.body[0], ast.Continue) else None
    return None


def given_in_turn(machine: Machine, node: ast.Yield, value: Value) -> Value:
    """Return an item of a generator: of a part where a test leaves the turns of the other ranks out."""
    module = machine.frame.module
    loop = next((one for one in module.ancestors(node) if isinstance(one, (ast.For, ast.AsyncFor))), None)
    test = turn_taken(machine.store, module, loop, node) if loop is not None else None
    return value if test is None else tagged(value, frozenset({(PART, _number(machine, test, value)), SHARE}))


def as_written(store: Store, module: Module, around: ast.AST) -> Part | None:
    """Return the place where code divides what it goes over by rank, by the names in it."""
    index = module.index
    found: list[ast.AST] = [node for node in index.within(around, ast.If) if gives_turns(store, node.test)]
    for subscript in index.within(around, ast.Subscript):
        limits = subscript.slice
        if not isinstance(limits, ast.Slice) or limits.lower is None or limits.step is None:
            continue
        if _named_so(store, limits.lower, limits.step) and (limits.upper is None or _is_length(module, limits.upper)):
            found.append(subscript)
    for call in index.within(around, ast.Call):
        name, arguments = last_name(call.func), call.args
        if name == "range" and len(arguments) == 3 and _named_so(store, arguments[0], arguments[2]):
            found.extend([call] if _is_length(module, arguments[1]) else [])
        elif takes_every_nth(store, call):
            found.append(call)
    if not found or _grows(module, around):
        return None
    return Part(found[0], module)


def takes_every_nth(store: Store, call: ast.Call) -> bool:
    """Return whether a call is ``itertools.islice(stream, rank, None, world_size)``, by names."""
    if last_name(call.func) != "islice" or len(call.args) != 4 or not _named_so(store, call.args[1], call.args[3]):
        return False
    return isinstance(call.args[2], ast.Constant) and call.args[2].value is None


def may_even_out(store: Store, module: Module, *, with_rest: bool) -> bool:
    """Return whether a module does arithmetic that can make the parts of all ranks equal, or has a word for it.

    Where the rest goes to one rank, the division that leaves the rest proves nothing.
    """
    if any(EVEN.search(word) for word in module.words):
        return True
    return any(_evens(store, module, node, with_rest=with_rest) for node in module.index.of(ast.BinOp))


def _evens(store: Store, module: Module, node: ast.BinOp, *, with_rest: bool) -> bool:
    if isinstance(node.op, ast.Mult) and with_rest:  # As many items as there are places: the last part is filled up.
        sides = _names(node.left), _names(node.right)
        others = [other for one, other in (sides, sides[::-1]) if one & _worlds(store)]
        ranks = rank_names(store)
        return any(other and not other & ranks and not any(map(_NO_DATA.search, other)) for other in others)
    if not isinstance(node.op, (ast.Mod, ast.FloorDiv, ast.Div)) or not _names(node.right) & _worlds(store):
        return False
    names = _names(node.left)
    if names & rank_names(store) or any(_NO_DATA.search(name) for name in names) or isinstance(node.left, ast.Constant):
        return False
    if not isinstance(node.op, ast.Mod):
        if with_rest or (isinstance(node.op, ast.Div) and "ceil" not in module.words):
            return False
        return all(getattr(outer, "name", "") != "__len__" for outer in module.ancestors(node))
    parent = module.parents.get(node)
    return not (isinstance(parent, ast.expr) and gives_turns(store, parent))


def as_part(
    machine: Machine, node: ast.AST, value: Unknown, *, with_rest: bool = False, items: int | None = None
) -> Unknown:
    """Mark a value as the part of the data that the present code cuts out for its rank."""
    number = _number(machine, node, value, with_rest, items)
    return Unknown(True, False, value.tags | {(PART, number), SHARE})


def divided(machine: Machine, node: ast.AST, rank: Value, count: Value) -> None:
    """Note that a call or a slice takes the part of ``rank`` of data that are divided into ``count`` parts."""
    machine.emit("division", "division", node, Arguments((), {"rank": rank, "num_replicas": count}))


def _number(machine: Machine, node: ast.AST, of: Value, with_rest: bool = False, items: int | None = None) -> int:
    number = machine.object_number(node)
    orders = frozenset(order for kind, order in tags_of(of) if kind == ORDER)
    machine.parts[number] = Part(node, machine.frame.module, with_rest, items, orders)
    return number


def is_rank(value: Value) -> bool:
    """Return whether a value differs between ranks by their numbers, and not by their data."""
    return is_varying(value) and not any(kind in _OWN for kind, _ in tags_of(value))


def _is_world(node: ast.expr, value: Value) -> bool:
    return any(kind == "world-size" for kind, _ in tags_of(value)) or bool(_names(node) & _WORLD_WORDS)


def _named_so(store: Store, start: ast.expr, step: ast.expr) -> bool:
    return bool(_names(start) & rank_names(store) and _names(step) & _worlds(store))


def _is_length(module: Module, node: ast.expr) -> bool:
    """Return whether an expression is ``len(something)``, or a variable that is only set to that."""
    value = node if isinstance(node, ast.Call) else _assigned(module, node)
    return isinstance(value, ast.Call) and last_name(value.func) == "len"


def _length_is_cut(machine: Machine, node: ast.expr) -> bool:
    value = node if isinstance(node, ast.Call) else _assigned(machine.frame.module, node)
    measured = value.args[0] if isinstance(value, ast.Call) and value.args else None
    return isinstance(measured, (ast.Name, ast.Attribute)) and CUT in tags_of(machine.evaluate(measured))


def _assigned(module: Module, node: ast.expr) -> ast.expr | None:
    """Return what a variable or attribute is set to, when the module sets it only once."""
    values = module.assigned(module.tree, node) if isinstance(node, (ast.Name, ast.Attribute)) else []
    return values[0] if len(values) == 1 else None


def _takes_rest(machine: Machine, upper: ast.expr) -> bool:
    """Return whether the end of a part is another one for the last rank, or rounded up and then limited."""
    values, module = [upper], machine.frame.module
    for statement in module.assigning(module.tree, upper.id) if isinstance(upper, ast.Name) else ():
        values.append(statement.value)
        around = module.parents.get(statement)
        if isinstance(around, ast.If) and _is_last_rank(machine.store, around.test):
            return True
    return any(
        (isinstance(value, ast.IfExp) and _is_last_rank(machine.store, value.test))
        or (isinstance(value, ast.Call) and last_name(value.func) == "min" and "ceil" in module.words)
        or any(_rounds_up(machine.store, part) for part in made_from(value, module.body_around(upper)))
        for value in values
    )


def _rounds_up(store: Store, node: ast.AST) -> bool:
    """Return whether the number of ranks divides something, rounded up: the last part is the shortest."""
    if isinstance(node, ast.Call):
        divided = node.args[0] if node.args and last_name(node.func) == "ceil" else None
        return isinstance(divided, ast.BinOp) and bool(_names(divided.right) & _worlds(store))
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.FloorDiv):
        return False
    worlds = _names(node.right) & _worlds(store)
    negative = isinstance(node.left, ast.UnaryOp) and isinstance(node.left.op, ast.USub)
    below = isinstance(node.left, ast.BinOp) and isinstance(node.left.op, ast.Sub) and _names(node.left) & worlds
    return bool(worlds) and (negative or bool(below))


def _is_last_rank(store: Store, test: ast.expr) -> bool:
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return False
    sides = test.left, test.comparators[0]
    return any(
        isinstance(other, ast.BinOp) and isinstance(other.op, ast.Sub) and _named_so(store, one, other)
        for one, other in (sides, sides[::-1])
    )


def _grows(module: Module, around: ast.AST) -> bool:
    """Return whether a list is made longer or cut, by itself or another: it may be padded."""
    if any(True for node in module.index.within(around, ast.AugAssign) if not isinstance(node.value, ast.Constant)):
        return True
    if any(last_name(node.func) == "extend" for node in module.index.within(around, ast.Call)):
        return True
    return any(
        isinstance(node.slice, ast.Slice) and node.slice.upper is not None and not _is_length(module, node.slice.upper)
        for node in module.index.within(around, ast.Subscript)
    )


def _names(node: ast.AST) -> frozenset[str]:
    return frozenset(_names_in(node))


def _names_in(node: ast.AST) -> Iterator[str]:
    for inner in descend(node):
        if isinstance(inner, (ast.Name, ast.Attribute)):
            yield last_name(inner)
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner.value
