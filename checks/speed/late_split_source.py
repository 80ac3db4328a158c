"""Streams of which each rank takes its share only after the work for every item is done."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ddpdoctor.check import Verdict
from ddpdoctor.checks.data.workers_source import reached_from
from ddpdoctor.checks.speed.input_bound import is_work
from ddpdoctor.finding import Location
from ddpdoctor.source.interpreter.scopes import Store
from ddpdoctor.source.interpreter.values import NONE, Instance, options_of
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.training_loops import feedings
from ddpdoctor.source.ranks.data_partitions import gives_turns, takes_every_nth
from ddpdoctor.source.script.module import Module, descend, last_name, made_from

_YIELDS = (ast.Yield, ast.YieldFrom)
_COMPREHENSIONS = (ast.ListComp, ast.GeneratorExp)


def late_splits(projection: Projection) -> Iterator[Verdict]:
    """Yield the late splits in the code of data sets that feed the training of a DDP model, each once."""
    store, modules = projection.machine.store, projection.machine.script.modules
    datasets = [
        dataset
        for feeding in feedings(projection)
        for dataset in options_of(feeding.loader.argument("dataset", 0) or NONE)
    ]
    found: dict[Verdict, None] = {}
    for dataset in datasets:
        if isinstance(dataset, Instance):
            found |= dict.fromkeys(_Code(reached_from(projection, dataset).places, store).late_splits())
    if datasets:
        places = tuple((module, module.tree) for module in modules)
        found |= dict.fromkeys(_Code(places, store).late_stages())
    yield from found


def _late(split: Location, module: Module, work: ast.AST) -> Verdict:
    place = module.location(work)
    return Verdict(
        sentence="the share of a rank is taken behind the work: each rank does that for all items, and drops the "
        "others'",
        remedy="Take the share of what is cheap, such as `paths[rank::world_size]` or the indices, before the items "
        "are loaded and transformed.",
        locations=(split, place),
        because=(
            f"`{module.excerpt(work)}` is run for each item, before the test whose item it is",
            module.location(work),
        ),
    )


class _Code:
    """The code that a data set runs, or all that was read."""

    def __init__(self, places: Sequence[tuple[Module, ast.AST]], store: Store) -> None:
        self._places = places
        self._store = store
        functions: dict[str, dict[ast.AST, Module]] = {}
        for module, place in places:
            for node in module.index.within(place, ast.FunctionDef):
                functions.setdefault(node.name, {})[node] = module
        self._functions: Mapping[str, list[tuple[Module, ast.AST]]] = {
            name: [(module, node) for node, module in found.items()] for name, found in functions.items()
        }

    def late_splits(self) -> Iterator[Verdict]:
        """Yield the splits by the number of an item behind the work."""
        for module, place in self._places:
            for split, source, before in self._splits(module, place):
                work = next(self._of_each(module, before), None) or next(self._behind(module, source, set()), None)
                if work is not None:
                    yield _late(module.location(split), *work)

    def late_stages(self) -> Iterator[Verdict]:
        """Yield the stages of pipelines that keep a rank's items, behind one that works on each."""
        for module, _ in self._places:
            for split, before in _stages(module):
                for stage in before:
                    work = next(self._of_stage(module, stage), None)
                    if work is not None:
                        yield _late(module.location(split), *work)
                        break

    def _of_stage(self, module: Module, stage: ast.AST) -> Iterator[tuple[Module, ast.AST]]:
        if not isinstance(stage, ast.Call):
            return
        if last_name(stage.func) == "decode":
            yield module, stage
        elif last_name(stage.func) == "map" and stage.args:
            function = stage.args[0]
            yield from self._of_each(module, (function,))
            for home, code in self._functions.get(last_name(function), ()):
                yield from self._of_each(home, (code,))

    def _splits(self, module: Module, place: ast.AST) -> Iterator[tuple[ast.AST, ast.expr, Iterable[ast.AST]]]:
        """Yield each split, what it goes over, and what is done for an item before."""
        for loop in module.index.within(place, ast.For):
            for number, node in enumerate(loop.body):
                if (
                    isinstance(node, ast.If)
                    and gives_turns(self._store, node.test)
                    and _drops(node, loop.body[number:])
                ):
                    yield node, loop.iter, loop.body[:number]
        comprehensions: tuple[ast.GeneratorExp | ast.ListComp, ...] = (
            *module.index.within(place, ast.GeneratorExp),
            *module.index.within(place, ast.ListComp),
        )
        for made in comprehensions:
            for over in made.generators:
                if any(_is_equal(test) and gives_turns(self._store, test) for test in over.ifs):
                    yield made, over.iter, ()
        for call in module.index.within(place, ast.Call):
            if takes_every_nth(self._store, call):
                yield call, call.args[0], ()

    def _behind(self, module: Module, source: ast.expr, seen: set[ast.AST]) -> Iterator[tuple[Module, ast.AST]]:
        """Yield the work for each item that what a loop goes over does."""
        for node in made_from(source, module.body_around(source)):
            if isinstance(node, _COMPREHENSIONS):
                yield from self._of_each(module, (node.elt,))
            if not isinstance(node, ast.Call):
                continue
            for home, function in self._functions.get(last_name(node.func), ()):
                if function in seen:
                    continue
                seen.add(function)
                for loop in descend(function):
                    if isinstance(loop, (ast.For, ast.While)):
                        yield from self._of_each(home, loop.body)
                    if isinstance(loop, ast.For):
                        yield from self._behind(home, loop.iter, seen)
                    elif isinstance(loop, _COMPREHENSIONS):
                        yield from self._of_each(home, (loop.elt,))

    def _of_each(self, module: Module, code: Iterable[ast.AST]) -> Iterator[tuple[Module, ast.AST]]:
        """Yield the calls in some code that work on an item, in functions of the project as well."""
        pending = [(module, node) for node in code]
        seen: set[ast.AST] = set()
        while pending:
            home, place = pending.pop()
            for node in descend(place):
                if not isinstance(node, ast.Call):
                    continue
                if is_work(home, node):
                    yield home, node
                for found in self._functions.get(last_name(node.func), ()):
                    if found[1] not in seen:
                        seen.add(found[1])
                        pending.append(found)


def _stages(module: Module) -> Iterator[tuple[ast.AST, Iterable[ast.AST]]]:
    """Yield each stage of a pipeline that divides what comes to it by rank, and what comes before it."""
    for call in module.calls_by_name.get("sharding_filter", ()):
        yield call, _before(module, call)
    for call in module.calls_by_name.get("compose", ()):
        if any(last_name(argument) == "split_by_node" for argument in call.args):
            yield call, _before(module, call)
    for call in module.calls_by_name.get("DataPipeline", ()):
        for number, argument in enumerate(call.args):
            if last_name(argument) == "split_by_node":
                yield argument, call.args[:number]


def _before(module: Module, call: ast.Call) -> Iterator[ast.AST]:
    """Yield what a method's object is made of, in variables as well, where it stands before the call."""
    end = call.func.end_lineno or 0, call.func.end_col_offset or 0
    for node in made_from(call.func, module.body_around(call)):
        if isinstance(node, ast.Call) and (node.end_lineno or 0, node.end_col_offset or 0) < end:
            yield node


def _drops(test: ast.If, rest: list[ast.stmt]) -> bool:
    """Return whether only the items of a rank are yielded: those of the others are skipped, or nothing else yields."""
    if not _is_equal(test.test):
        return isinstance(test.body[-1], ast.Continue) and not _yields(test.body)
    return _yields(test.body) and not _yields([*test.orelse, *rest[1:]])


def _is_equal(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq)


def _yields(code: Iterable[ast.AST]) -> bool:
    return any(isinstance(node, _YIELDS) for statement in code for node in descend(statement))
