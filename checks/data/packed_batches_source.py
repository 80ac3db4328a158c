"""Samplers of a script's own that put a rank's share into batches by what the samples hold."""

from __future__ import annotations

import ast

from ddpdoctor.check import Verdict
from ddpdoctor.finding import Location
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.attributes import base_names, class_attribute, run_by
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import ExternalObject, Function, Instance
from ddpdoctor.source.queries.divergence import nodes_of
from ddpdoctor.source.ranks.data_partitions import may_even_out
from ddpdoctor.source.script.module import Module, descend, dotted, last_name

_SHARES = "DistributedSampler"
# What is called with the number of a sample and tells nothing of what it holds.
_OF_NUMBERS = frozenset({"append", "add", "int", "str", "len", "list", "tuple", "isinstance", "print", "enumerate"})


def packed(machine: Machine, loader: Event, backward: Event) -> Verdict | None:
    """Return where the sampler of a loader puts a rank's share into batches by what the samples hold, and no rank asks
    the others how many they have.
    """
    for sampler in (loader.argument("batch_sampler", 4), loader.argument("sampler", 3)):
        turns = class_attribute(machine, sampler.cls, "__iter__") if isinstance(sampler, Instance) else None
        if not isinstance(sampler, Instance) or not isinstance(turns, Function):
            continue
        code = list(run_by(machine, sampler, turns))
        if any(
            _communicates(module, node) or may_even_out(machine.store, module, with_rest=False) for module, node in code
        ):
            continue
        for module, function in code:
            for loop in nodes_of(function):
                if isinstance(loop, ast.For) and _is_share(machine, sampler, loop.iter):
                    test = _test_of_content(loop)
                    if test is not None:
                        return _verdict(module, test, loader, backward)
    return None


def _verdict(module: Module, test: ast.If, loader: Event, backward: Event) -> Verdict:
    condition = module.excerpt(test.test, 60)
    place: Location = module.location(test)
    return Verdict(
        sentence="a sampler puts the rank's share into batches by what its samples hold: a rank with one batch more "
        "than another waits for it in its last step",
        locations=(loader.location, place),
        because=(
            (f"`{condition}` decides, sample by sample, when a batch is handed out", place),
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


def _test_of_content(loop: ast.For) -> ast.If | None:
    """Return the condition of a loop over the numbers of samples that decides, by what the samples hold, whether
    something is handed out.
    """
    numbers = {node.id for node in descend(loop.target) if isinstance(node, ast.Name)}
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
    tests = (node for node in inside if isinstance(node, ast.If) and tells(node.test))
    return next((one for one in tests if any(map(_hands_out, descend(one)))), None)


def _hands_out(node: ast.AST) -> bool:
    return isinstance(node, (ast.Yield, ast.YieldFrom, ast.Continue))
