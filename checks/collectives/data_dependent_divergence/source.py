"""Collectives that ranks call by what their own data is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Literal

import msgspec

from ddpdoctor.finding import Frame, Location
from ddpdoctor.source.events import Branch, Event, Loop, OwnKind, OwnTest, Tree, events_in, same
from ddpdoctor.source.interpreter.values import ALL_RANKS
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.divergence import partings
from ddpdoctor.source.queries.files import writes
from ddpdoctor.source.queries.sync_points import mentions
from ddpdoctor.source.script.code_words import uses_any
from ddpdoctor.source.script.module import Module
from ddpdoctor.source.script.syntax_index import descend, made_from
from ddpdoctor.source.torch_model.recorded_names import FILE_CALLS, FILE_METHODS

_SETS = frozenset({"set", "frozenset"})
_TENSORS = frozenset({"parameters", "buffers"})
"""Methods that give tensors, which are hashed by their addresses."""
_FIXES_ORDER = "PYTHONHASHSEED"


def collectives_in_set_order(projection: Projection) -> Iterator[tuple[Event, ast.For]]:
    """Collectives on what a loop over a set names, with that loop; each rank reaches another of them first."""
    if uses_any(projection.machine.script, (_FIXES_ORDER,)):
        return
    seen: set[ast.AST] = set()
    for event in projection.of_kind("collective"):
        loop = event.loops[-1].node if event.loops else None
        if event.node in seen or event.ranks != ALL_RANKS or not isinstance(loop, ast.For):
            continue
        names = [node.id for node in descend(loop.target) if isinstance(node, ast.Name)]
        arguments = event.node.args if isinstance(event.node, ast.Call) else []
        if any(mentions(argument, names) for argument in arguments) and _has_no_order(event.module, loop.iter):
            seen.add(event.node)
            yield event, loop


def _has_no_order(module: Module, node: ast.expr) -> bool:
    """Return whether an expression is a set of several strings or of tensors, or a variable that is always such a
    set.
    """
    if isinstance(node, ast.Name):
        given = [assigned.value for assigned in module.index.of(ast.Assign) if _assigns(assigned, node.id)]
        stores = [name for name in module.index.of(ast.Name) if name.id == node.id and name.ctx.__class__ is ast.Store]
        return len(given) == len(stores) == 1 and not isinstance(given[0], ast.Name) and _has_no_order(module, given[0])
    if isinstance(node, ast.Set):
        return _are_strings(node.elts)
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _SETS):
        return False
    (inner,) = node.args if len(node.args) == 1 else (node,)
    if isinstance(inner, (ast.List, ast.Tuple, ast.Set)):
        return _are_strings(inner.elts)
    return isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.func.attr in _TENSORS


def _assigns(statement: ast.Assign, name: str) -> bool:
    return [getattr(target, "id", "") for target in statement.targets] == [name]


def _are_strings(elements: list[ast.expr]) -> bool:
    """Return whether several different texts are written out: numbers have the same order in every process."""
    texts = {element.value for element in elements if isinstance(element, ast.Constant)}
    return len(texts) > 1 and all(isinstance(text, str) for text in texts) and len(elements) >= len(texts)


WORDS: Mapping[OwnKind, str] = {
    "batch": "the rank's own batch",
    "clock": "the rank's own clock",
    "files": "the rank's own view of the file system",
    "polled": "the names that this rank finds in a directory at that moment",
    "random": "random numbers that the ranks do not share",
    "store": "the number that this rank got from the store",
    "guard": "a number that only some ranks were given",
    "state": "what the rank decided from its own data before",
    "order": "a set, whose order differs between processes",
}
"""What a condition asks, for titles."""
_ASKS_FINITE = re.compile(r"isnan|isfinite|isinf|is_nan|is_finite|nan_")


class OwnParting(msgspec.Struct, frozen=True, kw_only=True):
    """A condition of a rank's own that decides over collectives."""

    how: Literal["branch", "loop", "raise"]
    """It chooses an arm, bounds a loop, or ends the rank."""
    kind: OwnKind
    condition: str
    """Source of the condition."""
    location: Location
    """The condition, or what the loop goes over."""
    chain: tuple[Frame, ...]
    collective: str
    """The first collective that only one of the outcomes runs."""
    collective_location: Location
    leaves: bool
    """An outcome leaves the turn, the loop or the function."""
    asked: frozenset[str]
    """The variables and attributes in the condition."""
    loop: ast.AST | None
    """The outermost loop of its function around it."""
    of_inputs: bool = False
    """It asks for files that nothing in the job makes: ranks see the same unless a disk is missing."""

    def is_one_with(self, other: OwnParting) -> bool:
        """Return whether another condition of the same function asks the same variable: one decision to agree on."""
        here, there = self.chain[0], other.chain[0]
        alike = (self.how, self.kind, self.of_inputs) == (other.how, other.kind, other.of_inputs)
        near = (here.file, here.function, self.loop) == (there.file, there.function, other.loop)
        return alike and near and bool(self.asked & other.asked)


def own_partings(projection: Projection) -> Iterator[OwnParting]:
    """Every such condition once, except where a rank test already keeps the same collective from some ranks."""
    made = _made_files(projection)
    told = {(parting.location.file, parting.location.line) for parting in partings(projection)}
    seen: set[ast.AST] = set()
    for walk in projection.walks:
        trees: list[Tree] = []
        for rank, tree in enumerate(walk.trees):
            if not walk.uncertain and not walk.raised >> rank & 1 and not any(same(tree, other) for other in trees):
                trees.append(tree)
        for test, how, event, leaves in (found for tree in trees for found in _in_tree(tree, None, set())):
            place = event.module.location(event.node)
            if test.node not in seen and (place.file, place.line) not in told:
                seen.add(test.node)
                found = _described(test, how, event, leaves)
                inputs = test.kind == "files" and not _is_made(made, test, event)
                yield msgspec.structs.replace(found, of_inputs=inputs)
    yield from _raises(projection, seen)
    for event, loop in collectives_in_set_order(projection):
        if loop.iter not in seen:
            yield _described(OwnTest(loop.iter, event.module, "order", event.chain), "loop", event, False)


_Made = tuple[Event, frozenset[str]]
"""A call that makes a file or a directory, and the words by which it names it."""


def _made_files(projection: Projection) -> list[_Made]:
    """Return what the job makes: by variables, attributes and texts in the paths."""
    makers = {*FILE_CALLS, *FILE_METHODS, "torch.save", "extractall"}
    found = [(use.event, frozenset(_words(use.node))) for use in writes(projection) if use.node is not None]
    for event in projection.events:
        if event.kind in ("call", "save", "training") and event.name in makers and isinstance(event.node, ast.Call):
            nodes = [*event.node.args, *([event.node.func] if event.name in FILE_METHODS else [])]
            found.append((event, frozenset(word for node in nodes for word in _words(node))))
    return found


def _is_made(made: list[_Made], test: OwnTest, decided: Event) -> bool:
    """Return whether a condition speaks of something that the job may have made by then: before, or in a turn
    before.
    """
    words = set(_words(test.node))
    body = test.module.body_around(test.node)
    words |= {word for node in made_from(test.node, body) for word in _words(node)}
    loops = {loop.node for loop in decided.loops}
    return any(
        words & named
        and _may_be_one(words, event, named)
        and (event.ordinal < decided.ordinal or any(loop.node in loops for loop in event.loops))
        for event, named in made
    )


def _may_be_one(words: set[str], made: Event, named: frozenset[str]) -> bool:
    """Return whether what a call makes may be what is asked for: a file of the same ending, where that is said."""
    asked, given = _endings(words), _endings(named)
    if not asked:
        return True
    return made.name.rpartition(".")[2] not in _DIRECTORIES and (not given or bool(asked & given))


def _endings(words: Iterable[str]) -> set[str]:
    return {match[0] for word in words if (match := _ENDING.search(word)) is not None}


def _words(node: ast.AST) -> Iterator[str]:
    for inner in descend(node):
        if isinstance(inner, ast.Attribute):
            if inner.attr not in _PLAIN_WORDS:
                yield inner.attr
        elif isinstance(inner, ast.Name):
            if inner.id not in _PLAIN_WORDS:
                yield inner.id
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str) and len(inner.value) > 3:
            yield inner.value


_ENDING = re.compile(r"\.[A-Za-z]\w{0,11}$")
_DIRECTORIES = frozenset({"mkdir", "makedirs"})
_PLAIN_WORDS = frozenset(
    {"os", "path", "join", "self", "args", "exists", "isfile", "isdir", "is_file", "is_dir", "str", "Path", "pathlib"}
    | {"cfg", "config", "opt", "hparams", "params", "format", "epoch", "step", "mkdir", "dirname", "basename"}
)
"""What conditions and paths have in common whatever they are about."""
_Found = tuple[OwnTest, Literal["branch", "loop"], Event, bool]


def _in_tree(tree: Tree, around: Loop | None, seen: set[int]) -> Iterator[_Found]:
    """Yield what stands in a tree; parts that alternatives share are looked at once."""
    for item in tree:
        if id(item) in seen:
            continue
        if isinstance(item, (Loop, Branch)):
            seen.add(id(item))
        if isinstance(item, Loop):
            first = next(events_in(item.body), None)
            if item.test is not None and first is not None:
                yield item.test, "branch" if isinstance(item.node, ast.While) else "loop", first, False
            yield from _in_tree(item.body, item, seen)
        elif isinstance(item, Branch):
            if item.test is not None:
                event = _difference(item.arms) or _first_in(around)
                if event is not None:
                    yield item.test, "branch", event, item.leaves
            for arm in item.arms:
                yield from _in_tree(arm, around, seen)


def _difference(arms: tuple[Tree, ...]) -> Event | None:
    """Return the first collective that one arm runs and another does not."""
    for one, other in pairwise(arms):
        position = 0
        while position < min(len(one), len(other)) and same((one[position],), (other[position],)):
            position += 1
        for rest in (one[position:], other[position:]):
            event = next(events_in(rest), None)
            if event is not None:
                return event
    return None


def _first_in(loop: Loop | None) -> Event | None:
    """Return what a rank that leaves a loop misses in the turns that the others still make."""
    return None if loop is None else next(events_in(loop.body), None)


def _raises(projection: Projection, seen: set[ast.AST]) -> Iterator[OwnParting]:
    """Exits with an error because a loss is not finite, in a job whose ranks average gradients."""
    met = [
        event
        for walk in projection.walks
        for event in events_in(walk.trees[0])
        if event.kind in ("backward", "collective")
    ]
    trained = next((event for event in met if event.kind == "backward"), met[0] if met else None)
    for test, _ in projection.machine.own_raises:
        if trained is None or test.node in seen or test.kind != "batch":
            continue
        if _ASKS_FINITE.search(test.module.excerpt(test.node, 1_000)):
            seen.add(test.node)
            yield _described(test, "raise", trained, True)


def _described(test: OwnTest, how: Literal["branch", "loop", "raise"], event: Event, leaves: bool) -> OwnParting:
    return OwnParting(
        how=how,
        kind=test.kind,
        condition=test.module.excerpt(test.node),
        location=test.module.location(test.node),
        chain=test.chain,
        collective=event.name,
        collective_location=event.module.location(event.node),
        leaves=leaves,
        asked=frozenset(_words(test.node)),
        loop=_outermost_loop(test),
    )


def _outermost_loop(test: OwnTest) -> ast.AST | None:
    found: ast.AST | None = None
    for around in test.module.ancestors(test.node):
        if isinstance(around, (ast.FunctionDef, ast.AsyncFunctionDef)):
            break
        if isinstance(around, (ast.For, ast.While)):
            found = around
    return found
