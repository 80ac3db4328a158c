"""Parts of all ranks that are gathered, and joined in an order that is not the data set's, or read by nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Literal

import msgspec

from ddpdoctor.check import Verdict
from ddpdoctor.files import regex
from ddpdoctor.finding import Severity
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import NONE, TRUE, ExternalObject, constant, tags_of
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.divergence import function_around, mentions
from ddpdoctor.source.queries.origins import NAMED, Origins, methods_of, pairs_of
from ddpdoctor.source.queries.shown_numbers import statements_after
from ddpdoctor.source.queries.training_loops import only_loader
from ddpdoctor.source.script.module import (
    FILLS,
    Module,
    argument_of,
    descend,
    dotted,
    last_name,
    made_from,
    parameters_of,
)
from ddpdoctor.source.vocabulary import DISTRIBUTED_SAMPLER, PART_GATHERS

# Parts of the ranks that are joined one after another and cut to the length of the data set.

_JOINS = frozenset({"cat", "concat", "concatenate", "sum", "chain", "from_iterable"})


def cut_gathers(projection: Projection) -> Iterator[Verdict]:
    """Yield what gathers the results of parts that a DistributedSampler made, with the cut of what was joined of it."""
    for event in projection.in_course("collective"):
        arguments = event.node.args if isinstance(event.node, ast.Call) else []
        lists = [one.id for one in arguments[:2] if isinstance(one, ast.Name)]
        if event.name not in PART_GATHERS or not lists or _dealt_out(projection, event) is None:
            continue
        body = event.module.body_around(event.node)
        for cut in (one for one in descend(body) if isinstance(one, ast.Subscript)):
            if not isinstance(cut.slice, ast.Slice) or cut.slice.lower is not None or cut.slice.upper is None:
                continue
            length = made_from(cut.slice.upper, body)
            measured = any(isinstance(one, ast.Call) and last_name(one.func) == "len" for one in length)
            if measured and any(_joins(one, lists) for one in made_from(cut.value, body)):
                yield Verdict(
                    sentence="the parts of all ranks, one after another, are not in the order of the samples: the cut "
                    "keeps repeated ones and drops real ones",
                    remedy="Put them in the order of the samples before the cut: torch.stack(parts, 1).flatten(0, 1), "
                    "as the sampler deals them out.",
                    locations=event.module.location(cut),
                    because=(
                        "these are the results of each rank's part, which DistributedSampler deals out in turns",
                        event.location,
                    ),
                    severity=Severity.WARNING,
                )


def _dealt_out(projection: Projection, gather: Event) -> tuple[Event, Event] | None:
    """Return the loader, and the sampler, that dealt out what a rank made its results of that it gives here, once."""
    machine = projection.machine
    numbers = {number for value in gather.positional for kind, number in tags_of(value) if kind == "batch"}
    loaders = [machine.events[number] for number in numbers if number in machine.events]
    samplers = [loader.argument("sampler", 3) for loader in loaders]
    repeats = any(only_loader(projection, loop) is not None for loop in gather.loops)
    sampler = samplers[0] if len(samplers) == 1 and not repeats else None
    made = machine.object(sampler) if isinstance(sampler, ExternalObject) else None
    return None if made is None or made.name != DISTRIBUTED_SAMPLER else (loaders[0], made)


def _joins(node: ast.AST, lists: list[str]) -> bool:
    """Return whether an expression puts the parts in some lists one after another."""
    if isinstance(node, (ast.ListComp, ast.GeneratorExp)) and len(node.generators) == 2:
        first, second = node.generators
        in_parts = isinstance(first.iter, ast.Name) and first.iter.id in lists
        return in_parts and ast.unparse(second.iter) == ast.unparse(first.target)
    given = node.args if isinstance(node, ast.Call) and last_name(node.func) in _JOINS else []
    return any(isinstance(one, (ast.Starred, ast.Name)) for one in given) and mentions(given[0], lists)


# Joined results that are compared with what the data set holds in its own order.

_DEEPEST = 8
_IN_TURNS = frozenset({"zip", "zip_longest"})


_PAIRED = "Gather the labels, or the indices, of the samples in the same way, and compare the results with those."
_WHYS = {
    "joined": ("the sampler deals samples out in turns, and the parts of the ranks stand one after another", _PAIRED),
    "batches": (
        "the sampler deals single samples out in turns, and whole batches of the ranks take turns here",
        "Keep one result a sample, results.extend(...), before the ranks' results take turns.",
    ),
    "shuffled": ("the sampler shuffles", _PAIRED),
}
"""In what joined results have another order than the data set, and the remedy."""


class _Gathered(msgspec.Struct, frozen=True, eq=False):
    event: Event
    lists: list[str]
    """The variables that hold the parts of all ranks, or of this one."""
    by_batch: bool
    shuffled: bool
    classes: frozenset[str]
    """What the loader divides is one of these."""
    held: frozenset[str]
    """The attributes that hold something for each sample, in the data set's order."""


def paired_out_of_order(projection: Projection) -> Iterator[Verdict]:
    """Yield comparisons of joined results with labels of the data set that its sampler dealt out in another order."""
    modules = projection.machine.script.modules
    origins = Origins(modules)
    gathers = [one for event in projection.in_course("collective") for one in _gathered(projection, origins, event)]
    seen: set[ast.AST] = set()
    for gathered in gathers:
        for module in modules:
            for node, one, other in _comparisons(module):
                for result, labels in ((one, other), (other, one)):
                    # Few things are of the data set; following a result through the functions takes longer.
                    own = node not in seen and _are_own(origins, gathered, module, labels)
                    why = _why(origins, gathered, module, result) if own else None
                    if why is not None:
                        seen.add(node)
                        told, remedy = _WHYS[why]
                        yield Verdict(
                            sentence=f"`{module.excerpt(result, 60)}` is not in the order of the data set that it is "
                            f"compared with: {told}",
                            remedy=remedy,
                            locations=module.location(node),
                            because=(
                                "each rank gives here what DistributedSampler dealt out to it",
                                gathered.event.location,
                            ),
                            severity=Severity.WARNING,
                        )


def _gathered(projection: Projection, origins: Origins, event: Event) -> Iterator[_Gathered]:
    if event.name not in PART_GATHERS or not isinstance(event.node, ast.Call):
        return
    dealt = _dealt_out(projection, event)
    lists = [one.id for argument in event.node.args[:2] for one in descend(argument) if isinstance(one, ast.Name)]
    if dealt is None or not lists:
        return
    loader, sampler = dealt
    given = sampler.node.args[:1] if isinstance(sampler.node, ast.Call) else []
    by_batch = constant(loader.argument("batch_size", 1) or NONE) != 1 and any(
        _holds_batches(origins, event.module, one) for one in event.node.args[:2]
    )
    for dataset in given:
        shuffled = constant(sampler.argument("shuffle", 3) or TRUE) is True
        made = origins.made(event.module, dataset)
        classes = frozenset(name for one in made if isinstance(one, ast.Call) and (name := last_name(one.func)))
        held = frozenset(_held_by_sample(origins, classes))
        if held:
            yield _Gathered(event, lists, by_batch, shuffled, classes, held)


def _holds_batches(origins: Origins, module: Module, node: ast.expr, depth: int = 0) -> bool:
    """Return whether a list is given one item in each turn of a loop over a loader."""
    if not isinstance(node, ast.Name) or depth > _DEEPEST:
        return False
    for call in (one for one in descend(module.body_around(node)) if isinstance(one, ast.Call)):
        if isinstance(call.func, ast.Attribute) and ast.unparse(call.func) == f"{node.id}.append":
            loop = next((one for one in module.ancestors(call) if isinstance(one, ast.For)), None)
            over = loop.iter if loop is not None else None
            while isinstance(over, ast.Call) and over.args and not _makes_loader(module, over):
                over = over.args[0]
            made = origins.made(module, over) if over is not None else []
            return any(isinstance(one, ast.Call) and _makes_loader(module, one) for one in made)
    return any(_holds_batches(origins, home, one, depth + 1) for home, one in origins.given(module, node))


def _makes_loader(module: Module, call: ast.Call) -> bool:
    return module.resolve(call.func).rpartition(".")[2] == "DataLoader"


def _comparisons(module: Module) -> Iterator[tuple[ast.expr, ast.expr, ast.expr]]:
    for compare in module.index.of(ast.Compare):
        if isinstance(compare.ops[0], (ast.Eq, ast.NotEq)):
            yield compare, compare.left, compare.comparators[0]
    for call in module.index.of(ast.Call):
        if len(call.args) == 2 and not any(isinstance(one, ast.Starred) for one in call.args):
            yield call, call.args[0], call.args[1]


def _why(
    origins: Origins, gathered: _Gathered, module: Module, node: ast.expr, depth: int = 0
) -> Literal["joined", "batches", "shuffled"] | None:
    """Return in what an expression, joined of gathered parts, has another order than the data set."""
    if depth > _DEEPEST:
        return None
    event = gathered.event
    if module is event.module and module.body_around(node) is module.body_around(event.node):
        way = _way(gathered, module, node)
        if way is not None:
            if way == "turns":
                return "batches" if gathered.by_batch else "shuffled" if gathered.shuffled else None
            return "joined"
    inner: list[tuple[Module, ast.expr]] = []
    if isinstance(node, NAMED):
        inner = [(home, one) for home, one in origins.given(module, node) if not _is_none(one)]
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        inner = [(module, node.value)]
    elif isinstance(node, ast.Call):
        results = origins.results(module, node)
        inner = [(home, one) for home, one in results if one is not None and not _is_none(one)]
        if not results:
            inner = [(module, node.func.value)] if isinstance(node.func, ast.Attribute) else []
            inner = [(module, one) for one in node.args[:1]] if not inner or _is_of_library(module, node) else inner
    found = [_why(origins, gathered, home, one, depth + 1) for home, one in inner]
    return found[0] if found and all(found) else None


def _is_of_library(module: Module, call: ast.Call) -> bool:
    return module.resolve(call.func).partition(".")[0] in ("numpy", "torch")


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _way(gathered: _Gathered, module: Module, node: ast.expr) -> Literal["turns", "parts"] | None:
    """Return how the gathered parts are joined in an expression, or in a list that a loop fills."""
    if _joins(node, gathered.lists):
        return "turns" if any(_takes_turns(one) for one in descend(node)) else "parts"
    if isinstance(node, (ast.ListComp, ast.GeneratorExp)) and len(node.generators) == 2:
        return "turns" if _takes_turns(node.generators[0].iter) and mentions(node, gathered.lists) else None
    if not isinstance(node, ast.Name):
        return None
    for loop in (one for one in descend(module.body_around(node)) if isinstance(one, ast.For)):
        fills = any(
            (isinstance(one, ast.Call) and ast.unparse(one.func) in (f"{node.id}.extend", f"{node.id}.append"))
            or (isinstance(one, ast.AugAssign) and ast.unparse(one.target) == node.id)
            for one in descend(loop)
        )
        if fills and mentions(loop.iter, gathered.lists):
            return "turns" if _takes_turns(loop.iter) else "parts" if isinstance(loop.iter, ast.Name) else None
    return None


def _takes_turns(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and last_name(node.func) in _IN_TURNS


def _are_own(origins: Origins, gathered: _Gathered, module: Module, node: ast.expr) -> bool:
    """Return whether an expression is what the divided data set holds, in its order: ``dataset.labels``."""
    while not isinstance(node, ast.Attribute):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args:
            node = node.func.value
        elif isinstance(node, ast.Call) and node.args:
            node = node.args[0]
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            node = node.value
        else:
            return False
    if node.attr not in gathered.held:
        return False
    classes, owner = gathered.classes, node.value
    if isinstance(owner, ast.Name) and owner.id == "self":
        around = next((one for one in module.ancestors(node) if isinstance(one, ast.ClassDef)), None)
        return around is not None and around.name in classes
    if isinstance(owner, ast.Attribute) and owner.attr == "dataset":
        return True
    return any(isinstance(one, ast.Call) and last_name(one.func) in classes for one in origins.values(module, owner))


def _held_by_sample(origins: Origins, classes: frozenset[str]) -> Iterator[str]:
    """Yield the attributes whose items a data set gives by the index of a sample."""
    for _, method in methods_of(origins.modules, classes, ("__getitem__",)):
        index = [each.arg for each in method.args.args[1:2]]
        for one in descend(method):
            name = dotted(one.value) if isinstance(one, ast.Subscript) and mentions(one.slice, index) else ""
            if name.startswith("self."):
                yield name.removeprefix("self.")


# Lists that a collective fills, and that nothing reads, while a rank goes on with its own part.

# The list, and what each rank gives, by their names and places.
_COLLECTED = {
    "all_gather": (("tensor_list", 0), ("tensor", 1)),
    "all_gather_object": (("object_list", 0), ("obj", 1)),
    "gather": (("gather_list", 1), ("tensor", 0)),
    "gather_object": (("object_gather_list", 1), ("obj", 0)),
}
# Functions and methods of torch that make a tensor of its own memory.
_MAKES_TENSORS = regex(r"(new_)?(zeros|ones|empty|full|rand|randn|tensor)(_like)?$|clone$")


def collected_in_vain(projection: Projection) -> Iterator[Verdict]:
    """Yield lists that a collective fills and nothing reads; the worse where a rank goes on with its own part."""
    seen: set[ast.AST] = set()
    for event in projection.in_course("collective"):
        call, module = event.node, event.module
        if event.name not in _COLLECTED or call in seen or not isinstance(call, ast.Call):
            continue
        seen.add(call)
        filled, own = (argument_of(call, *place) for place in _COLLECTED[event.name])
        filled = filled.body if isinstance(filled, ast.IfExp) else filled  # ``parts if rank == 0 else None``
        if isinstance(filled, ast.Name) and isinstance(own, (ast.Name, ast.Attribute)):
            name, text = filled.id, ast.unparse(own)
            after = (one for _, nodes in statements_after(module, call) for one in nodes)
            uses = (one for one in after if isinstance(one, (ast.Name, ast.Attribute)) and ast.unparse(one) == text)
            use = next(uses, None)
            assigned = [one for one in descend(module.body_around(call)) if isinstance(one, ast.Assign)]
            made = [value for one in assigned for to, value in pairs_of(one) if getattr(to, "id", "") == name]
            if name not in _unread(module, call) or not made or not all(map(_is_of_its_own, made)):
                continue
            sentence = f"nothing reads what {event.name} collects in `{name}`"
            remedy = f"Go on with what is in `{name}`, or leave the collective out."
            if use is None or not isinstance(use.ctx, ast.Load):
                yield Verdict(sentence=sentence, remedy=remedy, locations=event.location, severity=Severity.ADVICE)
                continue
            yield Verdict(
                sentence=f"{sentence}: `{text}` is this rank's own part",
                remedy=remedy,
                locations=event.location,
                because=(f"`{text}` is used here, with this rank's own value", module.location(use)),
                severity=Severity.WARNING,
            )


def _is_of_its_own(node: ast.expr) -> bool:
    """Return whether a list holds new tensors or nothing yet: what fills the parts of another tensor fills that."""
    if isinstance(node, ast.IfExp):
        return _is_of_its_own(node.body) and _is_of_its_own(node.orelse)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return any(isinstance(side, ast.List) and _is_of_its_own(side) for side in (node.left, node.right))
    if isinstance(node, ast.List):
        return all(map(_is_of_its_own, node.elts))
    if isinstance(node, ast.ListComp):
        return _is_of_its_own(node.elt)
    return isinstance(node, ast.Constant) or (
        isinstance(node, ast.Call) and _MAKES_TENSORS.match(last_name(node.func)) is not None
    )


def _unread(module: Module, call: ast.Call) -> set[str]:
    """Return the variables around a call, in its function, that nothing but one another and the call reads."""
    function = function_around(module, call)
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) or "locals" in module.words:
        return set()
    named = [one for one in descend(function) if isinstance(one, ast.Name)]
    outer = {name for one in descend(function) if isinstance(one, (ast.Global, ast.Nonlocal)) for name in one.names}
    calls = {one for one in descend(function) if isinstance(one, ast.Call) and last_name(one.func) in _COLLECTED}
    loads = [one for one in named if isinstance(one.ctx, ast.Load) and calls.isdisjoint(module.ancestors(one))]
    unread = {one.id for one in named if isinstance(one.ctx, ast.Store)} - outer - set(parameters_of(function))
    before: set[str] = set()
    while before != unread:
        before = set(unread)
        unread -= {one.id for one in loads if not _goes_nowhere(module, function, one, before)}
    return unread


def _goes_nowhere(module: Module, function: ast.AST, load: ast.Name, unread: set[str]) -> bool:
    """Return whether what is read where a variable is named goes to others that nothing reads, or nothing is."""
    around = module.parents[load]
    if function_around(module, load) is not function:
        return False
    if isinstance(around, ast.Subscript) and around.value is load:
        return not isinstance(around.ctx, ast.Load)
    if isinstance(around, ast.For) and load is around.iter:
        return isinstance(around.target, ast.Name) and around.target.id in unread
    if isinstance(around, ast.Assign):
        return all(isinstance(to, ast.Name) and to.id in unread for to in around.targets)
    call = module.parents.get(around) if isinstance(around, ast.Attribute) else around
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr not in FILLS:
        return False
    taker = call.func.value
    return isinstance(taker, ast.Name) and taker.id in unread and isinstance(module.parents[call], ast.Expr)
