"""All ranks draw the same random numbers for their augmentation.

What it finds
    A seed that is the same on every rank, never followed by one that depends on the rank, and a data set whose
    `__getitem__`, or a transform of torchvision that it holds, draws from that generator, or training steps that draw
    noise, masks or time steps from it. In a run: a
    generator in the same state on all ranks when the first training batch was fetched, and moved by the fetch.

Why it is bad
    The ranks draw the same crops, flips and noise in the same order: the n-th sample of every rank is augmented in the
    same way, so the global batch has less variety than it seems to have.

Example
    torch.manual_seed(0)                                # on every rank
    def __getitem__(self, index):
        return self.images[index] + torch.randn(3, 32, 32)

Remedy
    Keep the common seed for what has to agree (splits, synthetic data), then seed by rank before training:
    torch.manual_seed(seed + rank).

When it is wrong
    If ranks should augment identically. A common seed for initialisation alone is fine and is not reported, and nor are
    items that are seeded by their own number.

References
    https://docs.pytorch.org/docs/stable/notes/randomness.html
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import get_args

from ddpdoctor.check import Check
from ddpdoctor.checks.data.unseeded_random_split import Library, seeds_of
from ddpdoctor.files import regex
from ddpdoctor.finding import Finding, Location, Severity
from ddpdoctor.source.events import Event, LoopAround
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    ALL_RANKS,
    NONE,
    Const,
    ExternalObject,
    Instance,
    Value,
    constant,
    is_varying,
    options_of,
    parts_of,
)
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.shown_numbers import unsettled
from ddpdoctor.source.queries.training_loops import division, feedings
from ddpdoctor.source.script.module import Module, descend, made_from
from ddpdoctor.source.script.script import Script, uses_part
from ddpdoctor.source.vocabulary import SEEDING, SEEDS_EVERYTHING

CHECK = Check(
    code="DDP104",
    name="identical-random-seed",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ADVICE),
    needs=frozenset({"loaders", "forwards", "random_states", "seedings"}),
    subjects=("training",),
    triggers=("seed",),
)
REMEDY = "Seed by rank before training: torch.manual_seed(seed + rank), and so for numpy and random."


def in_source(script: Script) -> Iterator[Finding]:
    """Report common seeds from which augmentation draws."""
    for seed, draw, library in shared_augmentations(whole_projection(script)):
        yield CHECK.finding(
            "source",
            "every rank has this seed, and the data set's items draw from it: all ranks apply the same augmentation",
            remedy=REMEDY,
            locations=seed.location,
            because=((f"a draw from {library} per item", draw),),
        )
    for seed, draw in shared_noise(whole_projection(script)):
        yield CHECK.finding(
            "source",
            "every rank has this seed, and the training steps draw from it: all ranks draw the same noise",
            remedy=REMEDY,
            locations=seed.location,
            because=(("a draw in every step", draw),),
        )


in_run = CHECK.judged_by("checks.data.samples_run", "judge_randomness", REMEDY)


# Random augmentation in data sets, and whether all ranks draw the same numbers for it.

_DRAWS = regex(
    r"(random\.(random|randint|uniform|choice|choices|gauss|shuffle|sample|randrange))$"
    r"|(numpy\.random\.(rand|randn|randint|uniform|normal|choice|random|permutation|beta|shuffle))$"
    r"|(torch\.(rand|randn|randint|randperm|bernoulli|normal|rand_like|randn_like))$"
)
_LIBRARIES = get_args(Library)
# Draws of a step that give each sample something of its own; one order for all ranks does no harm.
_NOISE = frozenset(
    f"torch.{name}" for name in ("rand", "randn", "randint", "bernoulli", "normal", "rand_like", "randn_like")
)
# Transforms of torchvision that draw from torch for each item.
_TRANSFORMS = regex(
    r"torchvision\.transforms\.(v2\.)?"
    r"(Random\w+|ColorJitter|GaussianBlur|AutoAugment|RandAugment|TrivialAugmentWide|AugMix|ElasticTransform)$"
)


def shared_augmentations(projection: Projection) -> Iterator[tuple[Event, Location, Library]]:
    """Seeds that are the same on every rank, and where and by which library a sharded data set's items draw from it."""
    machine, seen = projection.machine, set[ast.AST]()
    for feeding in feedings(projection):
        loader = feeding.loader
        given = {"worker_init_fn", "generator"} & loader.named.keys()
        if given or not loader.complete or len(loader.positional) > 5 or division(machine, loader) != "sharded":
            continue
        workers = constant(loader.named.get("num_workers", Const(0)))
        for library, draw in _draws(projection, loader.argument("dataset", 0) or NONE):
            seed = _common_seed(projection, "torch" if workers != 0 else library)
            if seed is not None and seed.node not in seen:
                seen.add(seed.node)
                yield seed, draw, library


def shared_noise(projection: Projection) -> Iterator[tuple[Event, Location]]:
    """Seeds that are the same on every rank and from which every step draws, where no data set does so already."""
    if not uses_part(projection.machine.script, ("seed",)) or any(shared_augmentations(projection)):
        return
    for feeding in feedings(projection):
        loop = feeding.loop or next(reversed(feeding.backward.loops), None)
        if loop is not None and division(projection.machine, feeding.loader) == "sharded":
            draw = next(_noise(projection, loop), None)
            seed = _common_seed(projection, "torch") if draw is not None else None
            if draw is not None and seed is not None:
                yield seed, draw
                return


def _noise(projection: Projection, loop: LoopAround) -> Iterator[Location]:
    """Yield where every turn of a loop draws on all ranks, itself or in the forward of a DDP model."""
    for event in projection.in_course("call", "ddp-forward"):
        if event.kind == "call" and event.name not in _NOISE:
            continue
        inside = event.gradients and any(around.node is loop.node for around in event.loops)
        if not inside or event.ranks != ALL_RANKS or "generator" in event.named:
            continue
        if unsettled(projection.machine.script, event.undecided, loop.node, any_setting=True):
            continue
        if event.kind == "call":
            yield event.location
        else:
            wrap = projection.machine.object(event.receiver or NONE)
            for model in options_of((wrap.argument("module", 0) if wrap is not None else None) or NONE):
                if isinstance(model, Instance):
                    yield from (draw for _, draw in _draws_of_class(projection, model, "forward", _NOISE.__contains__))


def _draws(projection: Projection, dataset: Value) -> Iterator[tuple[Library, Location]]:
    """Yield where items of a data set draw: in its own methods, and in the transforms that it holds."""
    for held in _held(projection.machine, dataset, set()):
        if isinstance(held, Instance):
            yield from _draws_of_class(projection, held)
        elif _TRANSFORMS.match(held.name):
            yield "torch", held.location


def _held(machine: Machine, value: Value, seen: set[int]) -> Iterator[Instance | Event]:
    """Yield the objects that a value is made of, with what they were given and hold: the project's, and libraries'."""
    if isinstance(value, (Instance, ExternalObject)) and value.number not in seen:
        seen.add(value.number)
        made = machine.events.get(value.number)
        parts: list[Value | None] = [] if made is None else [*made.positional, *made.named.values()]
        if isinstance(value, Instance):
            yield value
            parts += [machine.store.get(value.number, name) for name in machine.store.names(value.number)]
        elif made is not None:
            yield made
        for part in parts:
            yield from _held(machine, part or NONE, seen)
    elif not isinstance(value, (Instance, ExternalObject)):
        for part in parts_of(value):
            yield from _held(machine, part, seen)


def _draws_of_class(
    projection: Projection,
    dataset: Instance,
    method: str = "__getitem__",
    is_draw: Callable[[str], object] = _DRAWS.match,
) -> Iterator[tuple[Library, Location]]:
    """Yield the draws in a method of a class, and in the methods of the class that it calls."""
    module = projection.machine.script.module(dataset.cls.module)
    if module is None:
        return
    methods = {node.name: node for node in dataset.cls.node.body if isinstance(node, ast.FunctionDef)}
    left, done = [(method, frozenset[str]())], set[tuple[str, frozenset[str]]]()
    while left:
        name, seeded = at = left.pop()
        if at in done or name not in methods:
            continue
        done.add(at)
        seeds = _seeds_of_items(module, methods[name])
        for node in descend(methods[name]):
            if not isinstance(node, ast.Call):
                continue
            own = seeded.union(*(libraries for line, libraries in seeds if line < node.lineno))
            if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "self":
                left.append((node.func.attr, own))
            drawn = module.resolve(node.func)
            library = drawn.partition(".")[0]
            if is_draw(drawn) and library not in own and not any(word.arg == "generator" for word in node.keywords):
                yield library, module.location(node)  # type: ignore[misc]


def _seeds_of_items(module: Module, method: ast.FunctionDef) -> list[tuple[int, frozenset[str]]]:
    """Return where a method seeds libraries with what it is given, its item's number, say, on every way through it."""
    given = {argument.arg for argument in method.args.args[1:]}
    found: list[tuple[int, frozenset[str]]] = []
    statements = [*method.body]
    for statement in statements:
        if isinstance(statement, ast.With):
            statements += statement.body
        elif isinstance(statement, ast.Expr) and isinstance(call := statement.value, ast.Call):
            name = module.resolve(call.func)
            made = (node for argument in call.args for node in made_from(argument, method))
            if SEEDING.search(name.rpartition(".")[2]) and any(isinstance(n, ast.Name) and n.id in given for n in made):
                everything = name in SEEDS_EVERYTHING
                found.append((call.lineno, frozenset(_LIBRARIES if everything else {name.partition(".")[0]})))
    return found


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
