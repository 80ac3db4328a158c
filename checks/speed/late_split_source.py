"""Streams of which each rank takes its share only after the work for every item is done."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from ddpdoctor.checks.data.workers_source import Reached, reached_from
from ddpdoctor.checks.speed.input_speed_source import is_work
from ddpdoctor.finding import Location
from ddpdoctor.source.interpreter.scopes import Store
from ddpdoctor.source.interpreter.values import NONE, Instance, options_of
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.training_loops import feedings
from ddpdoctor.source.ranks.data_partitions import gives_turns, takes_every_nth
from ddpdoctor.source.script.module import Module, descend, last_name, made_from

_YIELDS = (ast.Yield, ast.YieldFrom)
_COMPREHENSIONS = (ast.ListComp, ast.GeneratorExp)


class LateSplit(msgspec.Struct, frozen=True):
    """A place where a rank throws away what it has made for the others."""

    split: Location
    work: Location
    done: str
    """The work as it is written."""


def late_splits(projection: Projection) -> Iterator[LateSplit]:
    """Yield the late splits in the code of data sets that feed the training of a DDP model, each once."""
    seen: set[LateSplit] = set()
    for feeding in feedings(projection):
        for dataset in options_of(feeding.loader.argument("dataset", 0) or NONE):
            if isinstance(dataset, Instance):
                reached = reached_from(projection, dataset)
                for found in _Code(reached, projection.machine.store).late_splits():
                    if found not in seen:
                        seen.add(found)
                        yield found


class _Code:
    """The code that a data set runs."""

    def __init__(self, reached: Reached, store: Store) -> None:
        self._reached = reached
        self._store = store
        self._functions: Mapping[str, list[tuple[Module, ast.AST]]] = {}
        functions: dict[str, dict[ast.AST, Module]] = {}
        for module, place in reached.places:
            for node in module.index.within(place, ast.FunctionDef):
                functions.setdefault(node.name, {})[node] = module
        self._functions = {
            name: [(module, node) for node, module in found.items()] for name, found in functions.items()
        }

    def late_splits(self) -> Iterator[LateSplit]:
        for module, place in self._reached.places:
            for split, source, before in self._splits(module, place):
                work = next(self._of_each(module, before), None) or next(self._behind(module, source, set()), None)
                if work is not None:
                    yield LateSplit(module.location(split), work[0].location(work[1]), work[0].excerpt(work[1]))

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


def _drops(test: ast.If, rest: list[ast.stmt]) -> bool:
    """Return whether only the items of a rank are yielded: those of the others are skipped, or nothing else yields."""
    if not _is_equal(test.test):
        return isinstance(test.body[-1], ast.Continue) and not _yields(test.body)
    return _yields(test.body) and not _yields([*test.orelse, *rest[1:]])


def _is_equal(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq)


def _yields(code: Iterable[ast.AST]) -> bool:
    return any(isinstance(node, _YIELDS) for statement in code for node in descend(statement))
