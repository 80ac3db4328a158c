"""Samplers of a script's own that put a rank's share into batches by what the samples hold."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.check import Verdict
from ddpdoctor.finding import Location
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.attributes import base_names, class_attribute, run_by
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import ExternalObject, Function, Instance
from ddpdoctor.source.queries.divergence import nodes_of
from ddpdoctor.source.ranks.data_partitions import EVEN
from ddpdoctor.source.script.module import Module, descend, dotted, last_name

_SHARES = "DistributedSampler"
# What is called with the number of a sample and tells nothing of what it holds.
_OF_NUMBERS = frozenset({"append", "add", "int", "str", "len", "list", "tuple", "isinstance", "print", "enumerate"})


def packed(machine: Machine, loader: Event, backward: Event) -> Verdict | None:
    """Return where the sampler of a loader hands out a rank's share by what the samples hold, and no rank asks the
    others how much they have.
    """
    for name, position in (("batch_sampler", 4), ("sampler", 3)):
        sampler = loader.argument(name, position)
        turns = class_attribute(machine, sampler.cls, "__iter__") if isinstance(sampler, Instance) else None
        if not isinstance(sampler, Instance) or not isinstance(turns, Function):
            continue
        code = list(run_by(machine, sampler, turns))
        around = [*code, *_classes(machine, sampler)]
        if any(_communicates(module, node) or _makes_even(node) for module, node in around):
            continue
        for module, function in code:
            for loop in nodes_of(function):
                if isinstance(loop, ast.For) and _is_share(machine, sampler, loop.iter):
                    test = None if _is_filled_up(function, loop) else _test_of_content(function, loop)
                    if test is not None:
                        return _verdict(module, test, loader, backward, by_batches=name == "batch_sampler")
    return None


def _classes(machine: Machine, sampler: Instance) -> Iterator[tuple[Module, ast.AST]]:
    """Yield the classes of a sampler and of what it holds: any of their methods may ask the other ranks."""
    held = (machine.store.get(sampler.number, name) for name in machine.store.names(sampler.number))
    for one in (sampler, *(value for value in held if isinstance(value, Instance))):
        module = machine.script.module(one.cls.module)
        if module is not None:
            yield module, one.cls.node


def _makes_even(code: ast.AST) -> bool:
    """Return whether code has a word for shares that are made equal."""
    return any(
        EVEN.search(node.id if isinstance(node, ast.Name) else node.attr) is not None
        for node in descend(code)
        if isinstance(node, (ast.Name, ast.Attribute))
    )


def _is_filled_up(function: ast.AST, loop: ast.For) -> bool:
    """Return whether what a loop leaves is handed out, cut or filled up in turns of its own."""
    loops = [node for node in nodes_of(function) if isinstance(node, (ast.For, ast.While)) and node is not loop]
    return any(isinstance(one, ast.While) or one.lineno > (loop.end_lineno or loop.lineno) for one in loops)


def _verdict(module: Module, test: ast.If, loader: Event, backward: Event, *, by_batches: bool) -> Verdict:
    condition = module.excerpt(test.test, 60)
    place: Location = module.location(test)
    does = "puts the rank's share into batches" if by_batches else "leaves out samples of the rank's share"
    return Verdict(
        sentence=f"a sampler {does} by what its samples hold: a rank with one batch more than another waits for it in "
        "its last step",
        remedy="" if by_batches else "Leave them out before the data set is divided, so that every rank gets as many.",
        locations=(loader.location, place),
        because=(
            (f"`{condition}` decides, sample by sample, what is handed out", place),
            ("this backward waits for all ranks, once for each batch", backward),
        ),
    )


def _communicates(module: Module, function: ast.AST) -> bool:
    names = (module.resolve(node.func) for node in descend(function) if isinstance(node, ast.Call))
    return any(name.startswith("torch.distributed.") and "get_" not in name for name in names)


def _is_share(machine: Machine, sampler: Instance, over: ast.expr) -> bool:
    """Return whether a loop goes over what a DistributedSampler gives, or over every n-th of all samples."""
    if isinstance(over, ast.Call) and last_name(over.func) == "enumerate" and over.args:
        over = over.args[0]
    if ast.unparse(over) == "super().__iter__()":
        return any(name.endswith(f".{_SHARES}") for name in base_names(machine, sampler.cls))
    if isinstance(over, ast.Attribute) and dotted(over.value) == "self":
        held = machine.store.get(sampler.number, over.attr)
        return isinstance(held, ExternalObject) and held.name.endswith(f".{_SHARES}")
    nodes = set(descend(over))
    return any(part.node in nodes for part in machine.parts.values())


def _test_of_content(function: ast.AST, loop: ast.For) -> ast.If | None:
    """Return the condition of a loop over the numbers of samples that decides, by what the samples hold, whether
    something is handed out.
    """
    counted = isinstance(loop.iter, ast.Call) and last_name(loop.iter.func) == "enumerate"
    target = loop.target.elts[-1] if counted and isinstance(loop.target, ast.Tuple) else loop.target
    numbers = {node.id for node in descend(target) if isinstance(node, ast.Name)}
    told: set[str] = set()
    """Variables that say something of what samples hold."""

    def tells(expression: ast.AST) -> bool:
        for node in descend(expression):
            if isinstance(node, ast.Name) and node.id in told:
                return True
            given: list[ast.AST] = [node.slice] if isinstance(node, ast.Subscript) else []
            if isinstance(node, ast.Call) and last_name(node.func) not in _OF_NUMBERS:
                given = list(node.args)
            if any(isinstance(one, ast.Name) and one.id in numbers for part in given for one in descend(part)):
                return True
        return False

    inside = [node for statement in loop.body for node in (statement, *descend(statement))]
    for _ in range(2):  # What one turn sets the next one asks.
        for node in inside:
            if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if tells(node.value):
                    told.update(dotted(target) for target in targets)
    lists = _handed_out(function)
    tests = (node for node in inside if isinstance(node, ast.If) and tells(node.test))
    return next((one for one in tests if _decides(loop, one, lists)), None)


def _decides(loop: ast.For, test: ast.If, lists: set[str]) -> bool:
    """Return whether an arm of a condition hands something out, or passes over what does, and the other does not."""
    body, other = (
        any(_hands_out(node, lists) for one in arm for node in descend(one)) for arm in (test.body, test.orelse)
    )
    if isinstance(test.body[-1], ast.Continue):
        after = (one for one in loop.body if one.lineno > test.lineno)
        other = other or any(_hands_out(node, lists) for one in after for node in descend(one))
    return body != other


def _handed_out(function: ast.AST) -> set[str]:
    """Return the lists that a function returns, or goes over at last."""
    found: set[str] = set()
    for node in nodes_of(function):
        value = node.value if isinstance(node, (ast.Return, ast.YieldFrom)) else None
        while isinstance(value, ast.Call) and last_name(value.func) in ("iter", "list", "tuple") and value.args:
            value = value.args[0]
        if isinstance(value, ast.Name):
            found.add(value.id)
    return found


def _hands_out(node: ast.AST, lists: set[str]) -> bool:
    if isinstance(node, (ast.Yield, ast.YieldFrom)):
        return True
    adds = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append"
    return adds and dotted(node.func.value) in lists  # type: ignore[attr-defined]
