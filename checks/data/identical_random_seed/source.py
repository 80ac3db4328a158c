"""Random augmentation in data sets, and whether all ranks draw the same numbers for it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import msgspec

from ddpdoctor.checks.data.shared.random_numbers_source import Library, seeds_of
from ddpdoctor.finding import Location
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import ALL_RANKS, NONE, Const, Instance, constant, is_varying, options_of
from ddpdoctor.source.neighbours import SEEDS_EVERYTHING
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.training_loops import division, feedings
from ddpdoctor.source.script.syntax_index import descend

_DRAWS = re.compile(
    r"(?P<random>random\.(random|randint|uniform|choice|choices|gauss|shuffle|sample|randrange))$"
    r"|(?P<numpy>numpy\.random\.(rand|randn|randint|uniform|normal|choice|random|permutation|beta|shuffle))$"
    r"|(?P<torch>torch\.(rand|randn|randint|randperm|bernoulli|normal|rand_like|randn_like))$"
)


class SharedAugmentation(msgspec.Struct, frozen=True, eq=False):
    """Random numbers of a data set that are the same on all ranks."""

    seed: Event
    draw: Location
    library: Library


def shared_augmentations(projection: Projection) -> Iterator[SharedAugmentation]:
    """Seeds that are the same on every rank and from which the items of a sharded data set draw."""
    machine, seen = projection.machine, set[ast.AST]()
    for feeding in feedings(projection):
        loader = feeding.loader
        given = {"worker_init_fn", "generator"} & loader.named.keys()
        if given or not loader.complete or len(loader.positional) > 5 or division(machine, loader) != "sharded":
            continue
        for dataset in options_of(loader.argument("dataset", 0) or NONE):
            if not isinstance(dataset, Instance):
                continue
            workers = constant(loader.named.get("num_workers", Const(0)))
            for library, draw in _draws(projection, dataset):
                seed = _common_seed(projection, "torch" if workers != 0 else library)
                if seed is not None and seed.node not in seen:
                    seen.add(seed.node)
                    yield SharedAugmentation(seed, draw, library)


def _draws(projection: Projection, dataset: Instance) -> Iterator[tuple[Library, Location]]:
    module = projection.machine.script.module(dataset.cls.module)
    methods = [
        node for node in dataset.cls.node.body if isinstance(node, ast.FunctionDef) and node.name == "__getitem__"
    ]
    for method in methods if module is not None else ():
        for node in descend(method):
            match = (
                _DRAWS.match(module.resolve(node.func)) if module is not None and isinstance(node, ast.Call) else None
            )
            if match is not None and module is not None and isinstance(node, ast.Call) and not _has_generator(node):
                library: Library = "random" if match["random"] else "numpy" if match["numpy"] else "torch"
                yield library, module.location(node)


def _has_generator(call: ast.Call) -> bool:
    """Return whether a draw is made from a generator of its own, which no seed of the script reaches."""
    return any(keyword.arg == "generator" for keyword in call.keywords)


def _common_seed(projection: Projection, library: Library) -> Event | None:
    """Return the last seed of a library, when no seed before or after depends on the rank or hides its argument."""
    seeds = seeds_of(projection, library)
    for seed in seeds:
        arguments = [*seed.positional, *seed.named.values()]
        if len(arguments) != 1 or is_varying(arguments[0]) or seed.ranks != ALL_RANKS or seed.root or not seed.complete:
            return None
        if seed.name.partition(".")[0] not in {"torch", "numpy", "random"} and seed.name not in SEEDS_EVERYTHING:
            return None
    return seeds[-1] if seeds else None
