"""All ranks draw the same random numbers for their augmentation.

What it finds
    A seed that is the same on every rank, never followed by one that depends on the rank, and a data set whose
    `__getitem__` draws from that generator, itself or in what it calls of the project, or a transform of torchvision
    that it holds, or what joins the items to a batch; or training steps that draw noise, masks or time steps from it,
    or from a generator with the same seed on every rank. Or a `worker_init_fn` that seeds by the worker's number alone.
    In a run: a generator in the same state on all ranks when the first training batch was fetched, and moved by the
    fetch.

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
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from operator import or_
from typing import get_args

from ddpdoctor.check import Check, Reason, Script
from ddpdoctor.checks.data.drawn_items_source import DRAWS, called, callees, draws_its_items, held, methods
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
    Function,
    Instance,
    Value,
    constant,
    derived,
    is_varying,
    options_of,
    tags_of,
)
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.shown_numbers import unsettled
from ddpdoctor.source.queries.training_loops import division, feedings
from ddpdoctor.source.ranks.data_partitions import SHARE
from ddpdoctor.source.ranks.random_numbers import SEEDS
from ddpdoctor.source.ranks.ranks import ranks_text
from ddpdoctor.source.script.module import Module, descend, made_from
from ddpdoctor.source.script.script import uses_part
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

_OF_GENERATOR = "Seed the generator by rank: manual_seed(seed + rank)."
_OF_WORKER = "Give the workers of each rank seeds of their own: rank * num_workers + worker_id, say."


def in_source(script: Script) -> Iterator[Finding]:
    """Report common seeds from which augmentation draws."""
    projection = whole_projection(script)
    for seed, draw, library, in_worker in shared_augmentations(projection):
        yield CHECK.finding(
            "every rank has this seed, and the data set's items draw from it: all ranks apply the same augmentation",
            remedy=_OF_WORKER if in_worker else REMEDY,
            locations=seed,
            because=((f"a draw from {library} per item", draw), *_seeded_anew(projection, library)),
        )
    for seed, draw, by_generator in shared_noise(projection):
        yield CHECK.finding(
            "every rank has this seed, and the training steps draw from it: all ranks draw the same noise",
            remedy=_OF_GENERATOR if by_generator else REMEDY,
            locations=seed,
            because=(("a draw in every step", draw), *(() if by_generator else _seeded_anew(projection, "torch"))),
        )
    for event, draw, dimension in seeds_of_one_dimension(projection):
        yield CHECK.finding(
            f"this seed counts the ranks along dimension {dimension} of the mesh alone, and those along the others, "
            "which read other data, draw the same noise",
            remedy="Seed by the rank, or by all coordinates of the mesh along which the data is divided.",
            locations=event.location,
            because=("a draw in every step", draw),
        )


in_run = CHECK.judged_by("checks.data.samples_run", "judge_randomness", REMEDY)


def _seeded_anew(projection: Projection, library: Library) -> Iterator[Reason]:
    for event in seeds_of(projection, library):
        if event.ranks != ALL_RANKS:
            yield f"{ranks_text(event.ranks)} alone seeds anew here, and the others keep what they share", event
            return


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


def shared_augmentations(projection: Projection) -> Iterator[tuple[Location, Location, Library, bool]]:
    """Seeds that are the same on every rank, and where and by which library a sharded data set's items draw from it.

    Last whether each worker has the seed, from ``worker_init_fn``.
    """
    machine, seen = projection.machine, set[Location]()
    for feeding in feedings(projection):
        loader = feeding.loader
        if "generator" in loader.named or not loader.complete or len(loader.positional) > 7:
            continue
        if division(machine, loader) != "sharded" and not draws_its_items(machine, loader):
            continue
        workers = constant(loader.named.get("num_workers", Const(0)))
        begun = loader.named.get("worker_init_fn", NONE)
        for library, draw in _draws(projection, loader):
            seed: Location | None
            if begun == NONE:
                common = _common_seed(projection, "torch" if workers != 0 else library)
                seed = None if common is None else common.location
            else:
                seed = _seed_of_workers(machine, begun, library) if workers != 0 else None
            if seed is not None and seed not in seen:
                seen.add(seed)
                yield seed, draw, library, begun != NONE


def _seed_of_workers(machine: Machine, begun: Value, library: Library) -> Location | None:
    """Return where workers get a seed of a library that depends on nothing but their number."""
    module = machine.script.module(begun.module) if isinstance(begun, Function) else None
    if module is None or not isinstance(begun, Function):
        return None
    body = begun.node
    number = {one.arg for one in body.args.args}
    number |= {one.id for one in descend(body) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    for call in (one for one in descend(body) if isinstance(one, ast.Call)):
        name = module.resolve(call.func)
        if name not in SEEDS or (name.partition(".")[0] != library and name not in SEEDS_EVERYTHING):
            continue
        made = [one for given in call.args for one in made_from(given, body)]
        known = (ast.Constant, ast.BinOp, ast.operator, ast.expr_context)
        if made and all(isinstance(one, known) or getattr(one, "id", "") in number for one in made):
            return module.location(call)
    return None


def shared_noise(projection: Projection) -> Iterator[tuple[Location, Location, bool]]:
    """Seeds that are the same on every rank and from which every step draws, where no data set does so already.

    Last whether a generator of its own has the seed.
    """
    if not uses_part(projection.machine.script, ("seed",)) or any(shared_augmentations(projection)):
        return
    for feeding in feedings(projection):
        loop = feeding.loop or next(reversed(feeding.backward.loops), None)
        if loop is None or division(projection.machine, feeding.loader) != "sharded":
            continue
        for draw, generator in _noise(projection, loop):
            seed = _common_seed(projection, "torch") if generator is None else _seed_of(projection, generator)
            if seed is not None:
                yield seed.location, draw, generator is not None
                return


def seeds_of_one_dimension(projection: Projection) -> Iterator[tuple[Event, Location, int]]:
    """Seeds by one coordinate of a mesh where the data of the steps, which draw, is divided by the rank."""
    if not projection.machine.sharded:
        return
    from ddpdoctor.source.queries.meshes import coordinates_in, mesh_uses

    uses = [use for use in mesh_uses(projection) if not use.tensors]
    own = [one for one in seeds_of(projection, "torch") if is_varying(derived((*one.positional, *one.named.values())))]
    if not uses or len(own) != 1 or own[0].ranks != ALL_RANKS or not own[0].complete:
        return
    value = derived((*own[0].positional, *own[0].named.values()))
    along = coordinates_in(projection, value)
    if {kind for kind, _ in tags_of(value)} & {"rank-of-job", "rank-of-node"} or not along or None in along:
        return
    places = {(laid[0].ordinal, place) for laid in along if laid is not None for place in laid[1]}
    divided = {(use.made.ordinal, place) for use in uses for place in use.places}
    loaders = [one for one in feedings(projection) if division(projection.machine, one.loader) == "sharded"]
    for backward in projection.in_course("backward") if len(places) == 1 and places < divided else ():
        loop = next(reversed(backward.loops), None)
        forwards = (one for one in projection.in_course("forward") if loop in one.loops)
        given = [value for one in forwards for value in one.positional]
        sliced = any(SHARE in tags_of(value) and is_varying(value) for value in given)
        draws = _noise(projection, loop) if loop is not None and (sliced or loaders) else iter(())
        draw = next((place for place, _ in draws), None)
        if draw is not None:
            yield own[0], draw, next(iter(places))[1]
            return


def _seed_of(projection: Projection, generator: Value) -> Event | None:
    """Return where a generator of torch's got its seed, if every rank gives it the same one."""
    calls = [one for one in projection.of_kind("training") if one.receiver == generator and SEEDING.search(one.name)]
    alike = isinstance(generator, ExternalObject) and all(one.ranks == ALL_RANKS and not one.root for one in calls)
    return calls[-1] if calls and alike else None


def _noise(projection: Projection, loop: LoopAround) -> Iterator[tuple[Location, Value | None]]:
    """Yield where every turn of a loop draws on all ranks, in the forward of a DDP model or itself, and with what."""
    machine, steps = projection.machine, _EveryTurn(projection.machine, loop)
    inside = [
        event
        for event in projection.in_course("ddp-forward", "call")
        if event.gradients and event.ranks == ALL_RANKS and any(around.node is loop.node for around in event.loops)
    ]
    for event in (event for event in inside if event.kind == "ddp-forward"):
        wrap = machine.object(event.receiver or NONE)
        models = options_of((wrap.argument("module", 0) if wrap is not None else None) or NONE)
        places = [steps.draw_of(one) for model in models for one in methods(machine, model, "forward")]
        if all(steps.is_settled(module, test) for module, test in event.undecided):
            yield from ((place, None) for place in places if place is not None)
    for event in (event for event in inside if event.name in _NOISE):
        if all(steps.is_settled(*test) or steps.draws_in_both_arms(*test) for test in event.undecided):
            generator = event.named.get("generator", NONE)
            yield event.location, None if generator == NONE else generator


class _EveryTurn:
    """What functions draw in every turn of a loop, whichever arms of the conditions in them it takes."""

    def __init__(self, machine: Machine, loop: LoopAround) -> None:
        self._machine, self._loop = machine, loop
        self._known: dict[tuple[ast.AST, Value | None], Location | None] = {}
        self._read: dict[ast.AST, Function] = {}

    def is_settled(self, module: Module, test: ast.AST) -> bool:
        """Return whether a condition is the same in all turns."""
        return not unsettled(self._machine.script, ((module, test),), self._loop.node, any_setting=True)

    def draw_of(self, function: Function) -> Location | None:
        """Return a draw that each call of a function makes."""
        at, module = (function.node, function.receiver), self._machine.script.module(function.module)
        if at not in self._known and module is not None and isinstance(function.node, ast.FunctionDef):
            self._known[at] = None
            self._read[function.node] = function
            self._known[at] = self._of_block(module, function, function.node.body)
        return self._known.get(at)

    def draws_in_both_arms(self, module: Module, test: ast.AST) -> bool:
        """Return whether a function that was read draws in both arms of a condition."""
        around, function = module.parents.get(test), self._read.get(module.body_around(test))
        if function is None or not isinstance(around, ast.If):
            return False
        return self._of_block(module, function, [around]) is not None

    def _of_block(self, module: Module, function: Function, block: Sequence[ast.stmt]) -> Location | None:
        for number, statement in enumerate(block):
            if isinstance(statement, ast.If):
                arms = [self._of_block(module, function, arm) for arm in (statement.body, statement.orelse)]
                taken = _arm_of_training(statement.test)
                if taken is None and self.is_settled(module, statement.test):
                    found = arms[0] or arms[1]
                elif taken is None:
                    rest = self._of_block(module, function, block[number + 1 :])
                    left = [_leaves(arm) for arm in (statement.body, statement.orelse)]
                    ways = [arm or (None if leaves else rest) for arm, leaves in zip(arms, left, strict=True)]
                    return ways[1] if all(ways) else None
                elif _leaves((statement.body, statement.orelse)[taken]):
                    return arms[taken]
                else:
                    found = arms[taken]
            elif isinstance(statement, (ast.With, ast.For, ast.While, ast.Try)):
                found = self._of_block(module, function, statement.body)
            else:
                found = self._of_expression(module, function, statement)
            if found is not None:
                return found
        return None

    def _of_expression(self, module: Module, function: Function, whole: ast.AST) -> Location | None:
        waiting = [whole]
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.IfExp):
                taken = _arm_of_training(node.test)
                waiting += [] if taken is None else [(node.body, node.orelse)[taken]]
            elif not isinstance(node, (ast.Lambda, ast.FunctionDef, ast.ClassDef)):
                waiting += ast.iter_child_nodes(node)
            if not isinstance(node, ast.Call):
                continue
            if module.resolve(node.func) in _NOISE and not any(word.arg == "generator" for word in node.keywords):
                return module.location(node)
            run = callees(self._machine, module, function, node.func)
            found = next((place for one in run if (place := self.draw_of(one)) is not None), None)
            if found is not None:
                return found
        return None


def _arm_of_training(test: ast.expr) -> int | None:
    """Return which arm of a condition a model takes in training; None where it does not ask for that alone."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return 1 if _arm_of_training(test.operand) == 0 else None
    return 0 if isinstance(test, ast.Attribute) and test.attr == "training" else None


def _leaves(block: Sequence[ast.stmt]) -> bool:
    return bool(block) and isinstance(block[-1], (ast.Return, ast.Raise))


def _draws(projection: Projection, loader: Event) -> Iterator[tuple[Library, Location]]:
    """Yield where items of a loader draw: in methods of its data set, in what these call, or while they are joined."""
    machine = projection.machine
    collate = loader.argument("collate_fn", 6) or NONE
    yield from _draws_from(machine, called(machine, collate))
    for one in held(machine, loader.argument("dataset", 0) or NONE, set()):
        if isinstance(one, Instance):
            yield from _draws_from(machine, methods(machine, one, "__getitem__"))
        elif _TRANSFORMS.match(one.name):
            yield "torch", one.location


def _draws_from(machine: Machine, functions: Iterable[Function]) -> Iterator[tuple[Library, Location]]:
    """Yield the draws in functions and methods, and in those of the project that they call."""
    left = [(one, frozenset[str]()) for one in functions]
    done: set[tuple[ast.AST, Value | None, frozenset[str]]] = set()
    while left:
        function, seeded = left.pop()
        module = machine.script.module(function.module)
        at = function.node, function.receiver, seeded
        if at in done or module is None or not isinstance(function.node, ast.FunctionDef):
            continue
        done.add(at)
        seeds = _seeds_of_items(module, function.node)
        for node in descend(function.node):
            if not isinstance(node, ast.Call):
                continue
            own = seeded.union(*(libraries for line, libraries in seeds if line < node.lineno))
            left += [(one, own) for one in callees(machine, module, function, node.func)]
            drawn = module.resolve(node.func)
            library = drawn.partition(".")[0]
            if DRAWS.match(drawn) and library not in own and not any(word.arg == "generator" for word in node.keywords):
                yield library, module.location(node)  # type: ignore[misc]


def _seeds_of_items(module: Module, method: ast.FunctionDef) -> list[tuple[int, frozenset[str]]]:
    """Return where a method seeds libraries with what it is given, its item's number, say, on every way through it."""
    given = {argument.arg for argument in method.args.args} - {"self"}
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
    """Return the last seed of a library, when no seed before or after depends on the rank or hides its argument.

    One rank that seeds anew, as for the pictures that it makes, leaves the others with what they share.
    """
    seeds = seeds_of(projection, library)
    for seed in seeds:
        arguments = [*seed.positional, *seed.named.values()]
        if len(arguments) != 1 or is_varying(arguments[0]) or seed.root or not seed.complete:
            return None
        if seed.name.partition(".")[0] not in {"torch", "numpy", "random"} and seed.name not in SEEDS_EVERYTHING:
            return None
    common = [seed for seed in seeds if seed.ranks == ALL_RANKS]
    apart = reduce(or_, (seed.ranks for seed in seeds if seed.ranks != ALL_RANKS), 0)
    return common[-1] if common and apart.bit_count() < 2 else None
