"""Numbers that a rank computes from its own data: means, counts, running moments.

The walk tags what they are made into; what uses one in training, a check looks at.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from ddpdoctor.source.events import Event, Statistic
from ddpdoctor.source.interpreter.assignment import overwrite
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    ALL_RANKS,
    Const,
    ExternalObject,
    SequenceValue,
    Unknown,
    Value,
    constant,
    derived,
    is_agreed,
    tagged,
    tags_of,
)
from ddpdoctor.source.ranks.data_partitions import PART
from ddpdoctor.source.ranks.rank_local_values import DRAWN, is_own_loader
from ddpdoctor.source.script.module import descend, last_name
from ddpdoctor.source.vocabulary import DATA_LOADER

STATISTIC = "statistic"
"""Kind of the tags of what was made of a statistic of the rank's own; the number is that of the ``Statistic``."""
_REDUCES = frozenset(
    {
        "mean",
        "nanmean",
        "std",
        "var",
        "std_mean",
        "var_mean",
        "sum",
        "nansum",
        "median",
        "quantile",
        "percentile",
        "cov",
    }
    | {"bincount", "histc", "norm", "max", "min", "amax", "amin", "unique", "set", "frozenset"}
)
"""Functions and methods that make one number or a few of many samples."""
_DIMENSIONS = ("dim", "axis")
_CHANGES = frozenset({"add_", "sub_", "mul_", "div_", "lerp_", "addcmul_"})
"""Methods of a tensor that change it by arithmetic with another."""


def reduced(
    machine: Machine,
    node: ast.AST,
    name: str,
    receiver: Value | None,
    positional: Sequence[Value],
    named: Mapping[str, Value],
    result: Value,
) -> Value:
    """Return the result of a call, marked where it makes one number of the samples of a rank."""
    last = name.rpartition(".")[2]
    if last in _CHANGES and receiver is not None:
        return _changed(machine, node, receiver, positional, named, result)
    if last not in _REDUCES or not isinstance(result, Unknown):
        return result
    arguments = derived(positional if receiver is None else [receiver, *positional])
    if is_agreed(result) or not _is_of_own_data(machine, arguments, drawn=False):
        return result
    along = [named[word] for word in _DIMENSIONS if word in named] or list(positional[receiver is None :][:1])
    if any(_spares_samples(one) for one in along) or (len(positional) > 1 and last in ("max", "min")):
        return result
    return _marked(machine, node, result)


def carried(machine: Machine, statement: ast.Assign | ast.AugAssign, value: Value) -> Value:
    """Return what is assigned, marked where a variable takes something of the rank's own data from turn to turn."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    if not isinstance(value, Unknown) or len(targets) != 1 or not machine.loops or not _is_of_own_data(machine, value):
        return value
    if isinstance(statement, ast.Assign) and not _reads(statement.value, ast.unparse(targets[0])):
        return value
    over = _carrying(machine, statement, targets[0])
    return _marked(machine, statement, value, over) if over else value


def statistics_in(machine: Machine, value: Value, use: Event) -> list[Statistic]:
    """Return the statistics that a value is made of and that are older than the batch that they are used for."""
    found = (machine.statistics[number] for kind, number in tags_of(value) if kind == STATISTIC)
    return sorted((one for one in found if _outlasts(one, use)), key=lambda one: one.location.line)


def with_keys(value: Value, key: Value) -> Value:
    """Return the values of a dict whose keys are numbered by what the rank's own data holds: a vocabulary."""
    found = frozenset(tag for tag in tags_of(key) if tag[0] == STATISTIC)
    return tagged(value, found) if found else value


def _outlasts(statistic: Statistic, use: Event) -> bool:
    if any(loop.node in statistic.carried for loop in use.loops):
        return True
    if statistic.carried and not statistic.of_pass:
        return False
    around = [loop for loop in use.loops if loop.node not in statistic.loops]
    common = len(around) < len(use.loops)
    return (bool(around) or use.kind in ("object", "loader")) and (
        not common or any(_goes_over_batches(loop.iterable) for loop in around)
    )


def _goes_over_batches(iterable: Value) -> bool:
    return any(kind in ("batch", "loader") for kind, _ in tags_of(iterable)) or (
        isinstance(iterable, ExternalObject) and iterable.name == DATA_LOADER
    )


def _changed(
    machine: Machine,
    node: ast.AST,
    receiver: Value,
    positional: Sequence[Value],
    named: Mapping[str, Value],
    result: Value,
) -> Value:
    """Give a variable what a method such as ``mul_(0.9).add_(mean)`` makes of it, where that is of the rank's data."""
    value, root = derived([receiver, *positional, *named.values()]), node
    while isinstance(root, ast.Call) and last_name(root.func) in _CHANGES and isinstance(root.func, ast.Attribute):
        root = root.func.value
    if isinstance(root, ast.Attribute) and root.attr == "data":
        root = root.value
    if not isinstance(root, (ast.Name, ast.Attribute)) or not machine.loops or not _is_of_own_data(machine, value):
        return result
    over = _carrying(machine, node, root)
    if not over:
        return result
    marked = _marked(machine, node, value, over)
    overwrite(machine, root, marked)
    return marked


def _is_of_own_data(machine: Machine, value: Unknown, *, drawn: bool = True) -> bool:
    """Return whether a value is made of samples that other ranks do not have, at a place that every rank comes to.

    With ``drawn`` also of random numbers: what they are added up to before the training may be no more than a start.
    """
    if not value.varying or is_agreed(value) or machine.guards or machine.inside_ddp:
        return False
    if machine.mask != ALL_RANKS & ~machine.gone:
        return False
    return any(
        kind == PART or (drawn and (kind, number) == DRAWN) or (kind == "batch" and is_own_loader(machine, number))
        for kind, number in value.tags
    )


def _spares_samples(along: Value) -> bool:
    """Return whether a reduction leaves the samples apart: it goes along another dimension than the first."""
    if isinstance(along, SequenceValue):
        return bool(along.values) and Const(0) not in along.values
    number = constant(along)
    return isinstance(number, int) and not isinstance(number, bool) and number != 0


def _carrying(machine: Machine, node: ast.AST, target: ast.expr) -> frozenset[ast.AST]:
    """Return the loops whose next turns find what a variable holds: in none of them it is set anew.

    Of an attribute of an object these are all loops around; a variable of a function lives in one call of it.
    """
    module, name = machine.frame.module, ast.unparse(target)
    if name.startswith("self."):
        setting = (one for one in module.index.of(ast.Assign) if any(ast.unparse(each) == name for each in one.targets))
        others = (one for one in setting if getattr(module.body_around(one), "name", "") != "__init__")
        kept = all(_reads(one.value, name) for one in others)
        return frozenset(loop.around.node for loop in machine.loops) if kept else frozenset()
    found: set[ast.AST] = set()
    for loop in module.ancestors(node) if isinstance(target, ast.Name) else ():
        if isinstance(loop, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            break
        if isinstance(loop, (ast.For, ast.While)):
            if any(_sets_anew(one, name) for one in descend(loop)):
                break
            found.add(loop)
    return frozenset(found)


def _sets_anew(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Assign):
        return any(_sets_in(target, name) for target in node.targets) and not _reads(node.value, name)
    return isinstance(node, (ast.For, ast.comprehension)) and _sets_in(node.target, name)


def _sets_in(target: ast.expr, name: str) -> bool:
    return any(isinstance(one, ast.Name) and one.id == name for one in descend(target))


def _reads(value: ast.expr, name: str) -> bool:
    inside = (one for one in descend(value) if isinstance(one, (ast.Name, ast.Attribute)))
    return isinstance(value, ast.BinOp) and any(ast.unparse(one) == name for one in inside)


def _marked(machine: Machine, node: ast.AST, value: Unknown, over: frozenset[ast.AST] = frozenset()) -> Unknown:
    number = machine.object_number(node)
    loops = frozenset(loop.around.node for loop in machine.loops)
    of_pass = any(loop.around.node in over and _goes_over_batches(loop.around.iterable) for loop in machine.loops)
    machine.statistics[number] = Statistic(node, machine.frame.module, loops, over, of_pass)
    return Unknown(True, value.opaque, value.tags | {(STATISTIC, number)}, value.not_none)
