"""Conditions on a counter of turns and the number of the rank, which hold in another number of turns on each rank."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import BINARY, NONE, ORDERINGS, PerRank, constant, is_varying, on_rank, tags_of
from ddpdoctor.source.script.module import Scope, descend, last_name
from ddpdoctor.source.vocabulary import JOINS, SAME_ITEMS

_WORLDS = (2, 4)
"""Sizes of the job for which the turns are counted."""
_MOST_TURNS = 1_000
_FEWEST_TURNS = 900
"""Of a loop of unknown length: what differs has to differ after this many turns, and after each one up to the most."""
_ARITHMETIC = frozenset({ast.Add, ast.Sub, ast.Mult, ast.Mod, ast.FloorDiv})
"""Operators that make numbers of turns of such."""
_Counter = tuple[str, Sequence[int], bool]
"""The source of a variable or attribute, its values turn by turn, and whether these are all."""
_LEAVING = (ast.Continue, ast.Break, ast.Return, ast.Raise)


class _UnknownError(Exception):
    """A part of a condition is no known number."""


def holds_unequally(machine: Machine, test: ast.expr) -> bool:
    """Return whether a condition certainly holds in another number of turns on each rank, in jobs of any size."""
    if any(isinstance(one.node, ast.Call) and last_name(one.node.func) in JOINS for one in machine.contexts):
        return False
    tested = _written_out(machine, test)
    for counter, values, are_all in _counters(machine, test):
        named = (node for node in descend(tested) if isinstance(node, (ast.Name, ast.Attribute)))
        if any(ast.unparse(node) == counter for node in named):
            try:
                return all(_differ(machine, tested, counter, values, are_all, size) for size in _WORLDS)
            except (_UnknownError, ZeroDivisionError):
                return False
    return False


def _written_out(machine: Machine, test: ast.expr) -> ast.expr:
    """Return the condition that a variable was assigned, where it is one, with those that stand around it."""
    module = machine.frame.module
    parts = [test]
    if isinstance(test, ast.Name):
        assigned = module.assigned(module.body_around(test), test)
        parts = assigned if len(assigned) == 1 else parts
    inner: ast.AST = test
    for around in module.ancestors(test):
        if isinstance(around, (ast.For, ast.While, Scope)):
            break
        if isinstance(around, ast.If) and inner is not around.test:
            parts.append(around.test if inner in around.body else ast.UnaryOp(ast.Not(), around.test))
        inner = around
    return ast.BoolOp(ast.And(), parts)


def _counters(machine: Machine, test: ast.expr) -> Iterator[_Counter]:
    """Yield what counts the turns of the innermost loop around a condition, or the calls of its method in a loop."""
    for outer in machine.frame.module.ancestors(test):
        if isinstance(outer, (ast.For, ast.While, Scope)):
            before = [node for part in outer.body for node in descend(part) if getattr(node, "lineno", 0) < test.lineno]
            if any(isinstance(node, _LEAVING) for node in before) or not machine.loops:
                return
            inside = [node for part in outer.body for node in descend(part)]
            stored = [ast.unparse(node) for node in inside if isinstance(getattr(node, "ctx", None), ast.Store)]
            yield from (one for one in _added_up(machine, outer) if stored.count(one[0]) == 1)
            if isinstance(outer, ast.For):
                yield from (one for one in _of_loop(machine, outer) if one[0] not in stored)
            return


def _added_up(machine: Machine, around: ast.For | ast.While | Scope) -> Iterator[_Counter]:
    for one in around.body:
        added = one.value if isinstance(one, ast.AugAssign) and isinstance(one.op, ast.Add) else None
        if isinstance(one, ast.AugAssign) and isinstance(added, ast.Constant) and added.value == 1:
            kept = isinstance(one.target, ast.Attribute) or not isinstance(around, Scope)
            if kept and not is_varying(machine.held(one.target)):
                yield ast.unparse(one.target), range(1, _MOST_TURNS), False


def _of_loop(machine: Machine, loop: ast.For) -> Iterator[_Counter]:
    over, target = loop.iter, loop.target
    while isinstance(over, ast.Call) and over.args and last_name(over.func) in SAME_ITEMS - {"enumerate", "zip"}:
        over = over.args[0]
    if not isinstance(over, ast.Call) or over.keywords or is_varying(machine.loops[-1].around.iterable):
        return
    name = last_name(over.func)
    if name == "enumerate" and isinstance(target, ast.Tuple) and len(over.args) == 1:
        yield ast.unparse(target.elts[0]), range(_MOST_TURNS), False
    elif name == "range" and isinstance(target, ast.Name):
        bounds = [one.value if isinstance(one, ast.Constant) else constant(machine.held(one)) for one in over.args]
        numbers = [number for number in bounds if isinstance(number, int)]
        if len(numbers) == len(bounds) and 0 not in numbers[2:]:
            turns = range(*numbers)
            ends = any(isinstance(node, (ast.Break, ast.Return)) for part in loop.body for node in descend(part))
            are_all = len(turns) <= _MOST_TURNS and not ends
            longer = range(turns.start, turns.start + turns.step * _MOST_TURNS, turns.step)
            yield target.id, turns if are_all else longer, are_all
        elif len(bounds) == 1:
            yield target.id, range(_MOST_TURNS), False


def _differ(machine: Machine, test: ast.expr, counter: str, values: Sequence[int], are_all: bool, size: int) -> bool:
    """Return whether the ranks of a job of some size hold a condition in different numbers of turns."""
    counts = [0] * size
    alike_late = False
    known = [dict[str, int]() for _ in range(size)]
    for number, value in enumerate(values):
        for rank in range(size):
            known[rank][counter] = value
            counts[rank] += bool(_number(machine, test, known[rank], rank, size))
        alike_late = alike_late or (number >= _FEWEST_TURNS and len(set(counts)) == 1)
    return len(set(counts)) > 1 and (are_all or not alike_late)


def _number(machine: Machine, node: ast.AST, known: dict[str, int], rank: int, size: int) -> int:
    """Return what an expression is on a rank; ``known`` keeps what its names are."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, (ast.Name, ast.Attribute)):
        name = ast.unparse(node)
        if name not in known:
            known[name] = _held(machine, node, rank, size)
        return known[name]
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        sides = (_number(machine, side, known, rank, size) for side in (node.left, node.right))
        return int(BINARY[type(node.op)](*sides))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return not _number(machine, node.operand, known, rank, size)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in ORDERINGS:
        sides = (_number(machine, side, known, rank, size) for side in (node.left, node.comparators[0]))
        return int(ORDERINGS[type(node.ops[0])](*sides))
    if isinstance(node, ast.BoolOp):
        parts = [_number(machine, part, known, rank, size) for part in node.values]
        return all(parts) if isinstance(node.op, ast.And) else any(parts)
    if isinstance(node, ast.Call) and not node.args and not node.keywords:
        asked = machine.frame.module.resolve(node.func)
        if asked in ("torch.distributed.get_rank", "torch.distributed.get_world_size"):
            return rank if asked.endswith("rank") else size
    raise _UnknownError


def _held(machine: Machine, node: ast.expr, rank: int, size: int) -> int:
    value = machine.held(node)
    if value == NONE:
        value = machine.evaluate(node)
    if {kind for kind, _ in tags_of(value)} == {"world-size"}:
        return size
    number = constant(on_rank(value, rank))
    if not isinstance(number, int) or (isinstance(value, PerRank) and value.guessed):
        raise _UnknownError
    return number
