"""Every rank splits the data set differently.

What it finds
    `random_split`, scikit-learn's `train_test_split`, or shuffled indices cut into parts, drawn on every rank without a
    seed, or with a seed that depends on the rank. In a run: the parts hold other indices on another rank. Also a list
    that every rank shuffles so before it takes its part by rank, as in files[rank::world_size]: a warning.

Why it is bad
    Each rank holds out different samples. What one rank validates on, the others train on: training data leaks into the
    validation, its result looks too good, and nothing fails. A DistributedSampler over such parts indexes a different
    list on every rank as well. Parts that ranks take of lists in different orders overlap: some samples are seen by
    several ranks in each epoch, and others by none.

Example
    train, val = random_split(dataset, [0.9, 0.1])

Remedy
    Give the split a generator with a fixed seed: generator=torch.Generator().manual_seed(0); or seed torch, numpy and
    random with the same number on every rank before it.

When it is wrong
    If unread code seeds the generators, or the samples of the ranks are disjoint before the split.

References
    https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.random_split
    https://docs.pytorch.org/docs/stable/notes/randomness.html
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from typing import Literal

import msgspec

from ddpdoctor.check import Check, Reason, Script
from ddpdoctor.files import regex
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.events import Event, Part, Placed
from ddpdoctor.source.interpreter.loops import item_aside
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    ALL_RANKS,
    NONE,
    ExternalObject,
    Instance,
    Tag,
    Value,
    constant,
    options_of,
    tags_of,
)
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.job_kind import is_distributed, is_run_again, is_training_by_trainer
from ddpdoctor.source.queries.training_loops import feedings
from ddpdoctor.source.ranks.data_partitions import ORDER, PIECE, PIECES, part_tags
from ddpdoctor.source.ranks.random_numbers import (
    DATA_METHODS,
    ORDERING_METHODS,
    ORDERS,
    TAKES_SEED,
    TORCHS,
    differs,
    draws_by_itself,
    is_by_rank,
    is_own_seed,
    seed_before,
    state_at,
    state_of,
)
from ddpdoctor.source.ranks.ranks import rank_names
from ddpdoctor.source.script.module import Module, descend, last_name, made_from
from ddpdoctor.source.vocabulary import SEEDING

CHECK = Check(
    code="DDP107",
    name="unseeded-random-split",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ERROR),
    needs=frozenset({"loaders", "parts"}),
    subjects=("job",),
    triggers=("random_split", "train_test_split", "Subset", "DistributedSampler", "shuffle", "perm"),
)
REMEDY = (
    "Pass generator=torch.Generator().manual_seed(0) (random_state=0 for scikit-learn), or seed every rank with the "
    "same number before it."
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report random splits that differ between ranks, and lists in orders that do, of which ranks take parts."""
    projection = whole_projection(script)
    for draw in unshared_splits(projection):
        yield CHECK.finding(
            f"every rank draws its own {_last(draw)}: what one rank holds out, other ranks train on",
            remedy=REMEDY,
            locations=draw.event.location,
            because=_why_it_differs(draw),
        )
    for draw in unshared_parts(projection):
        yield _of_part(_last(draw), draw.event, _why_it_differs(draw))
    for order, part in parts_of_own_orders(projection):
        name = last_name(order.node.func) if isinstance(order.node, ast.Call) else "draw"
        yield _of_part(name, order, ("here each rank takes its part of what it has put in order", part.location))


def _of_part(name: str, place: Placed, because: Reason) -> Finding:
    return CHECK.finding(
        f"every rank makes its own random order ({name}) before it takes its part by rank: the parts "
        "overlap, and some samples are in none",
        remedy="Draw the same order on every rank, from a generator with a fixed seed (and the epoch added).",
        locations=place.location,
        because=because,
        severity=Severity.WARNING,
    )


def _last(draw: Draw) -> str:
    return draw.event.name.rpartition(".")[2]


def _why_it_differs(draw: Draw) -> Reason:
    if draw.seed is not None:
        return "this seed depends on the rank", draw.seed.location
    return "no earlier call gives the ranks a common seed, and each process starts with its own", draw.event


in_run = CHECK.judged_by("checks.data.samples_run", "judge_splits", REMEDY)


Library = Literal["torch", "numpy", "random"]
_SPLIT_METHOD = "train_test_split"
_SPLITS = frozenset({"torch.utils.data.random_split", "sklearn.model_selection.train_test_split", _SPLIT_METHOD})
# What makes a data set of Hugging Face, by its full name.
_TABLES = regex(r"^datasets\.(\w+\.)*(load_dataset|load_from_disk|(Dataset|DatasetDict)\.from_\w+)$")
# Data sets within data sets.
_DEEPEST = 3
_SHARED_LATER = frozenset({"broadcast_object_list", "broadcast", "scatter_object_list", "all_gather_object"})


class Draw(msgspec.Struct, frozen=True, eq=False):
    """A draw of random numbers that differs between ranks."""

    event: Event
    seed: Event | None
    """The seed before it, which differs between ranks; None when there is none."""


def unshared_splits(projection: Projection) -> Iterator[Draw]:
    """Random splits of a data set that every rank makes on its own and differently."""
    if not is_distributed(projection):
        return
    for event in projection.in_course("call"):
        if (
            _draws(event)
            and _on_every_rank(event)
            and _divides(projection, event)
            and not _shared_after(projection, event)
        ):
            draw = unshared_draw(projection, event)
            if draw is not None:
                yield draw
    yield from _splits_of_imports(projection)


def _splits_of_imports(projection: Projection) -> Iterator[Draw]:
    """Splits at the top level of a script that spawns its ranks: each rank imports it, and so draws its own."""
    script = projection.machine.script
    for event in (one for one in projection.events if one.in_parent and one.kind == "call"):
        if event.name in _SPLITS and _splits(event) and is_run_again(script, event) and _is_read_in_function(event):
            draw = unshared_draw(projection, event)
            if draw is not None:
                yield draw


def _is_read_in_function(event: Event) -> bool:
    """Return whether a function reads what a draw at the top level has filled, by its name there."""
    statement = next((node for node in event.module.ancestors(event.node) if isinstance(node, ast.Assign)), None)
    if statement is None:
        return False
    filled = {node.id for target in statement.targets for node in descend(target) if isinstance(node, ast.Name)}
    for function in event.module.index.of(ast.FunctionDef):
        inside = [node for node in descend(function) if isinstance(node, ast.Name) and node.id in filled]
        own = {node.id for node in inside if not isinstance(node.ctx, ast.Load)}
        own |= {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
        if any(node.id not in own for node in inside):
            return True
    return False


def unshared_parts(projection: Projection) -> Iterator[Draw]:
    """Lists that every rank shuffles on its own and differently, before each takes its part of them by its number."""
    if not is_distributed(projection):
        return
    for event in projection.in_course("call"):
        if not _draws(event) or event.name in _SPLITS or not _on_every_rank(event):
            continue
        of_table = event.name in DATA_METHODS and not _by_own_generator(event)
        by_library = of_table and _is_divided_later(projection, event)
        if (by_library or _is_taken_by_rank(projection, event)) and not _shared_after(projection, event):
            draw = unshared_draw(projection, event)
            if draw is not None:
                yield draw


def parts_of_own_orders(projection: Projection) -> Iterator[tuple[Placed, Part]]:
    """Yield the draws by which the streams that feed the training order their items on each rank in its own way, each
    with where ranks then take their parts.

    A worker seeds the generators of Python and numpy after torch's, which has to differ as well.
    """
    machine, seen = projection.machine, set[ast.AST]()
    for feeding in feedings(projection) if is_distributed(projection) else ():
        dataset, workers = feeding.loader.argument("dataset", 0), feeding.loader.argument("num_workers", 5)
        if not isinstance(dataset, Instance) or not feeding.certain:
            continue
        begun = [feeding.loader.named.get(name, NONE) for name in ("worker_init_fn", "generator")]
        aside = workers is not None and constant(workers) != 0
        if aside and (any(one != NONE for one in begun) or not differs(state_of(machine, TORCHS))):
            continue
        taken = (machine.parts[number] for number in part_tags(item_aside(machine, dataset)))
        for part, number in ((one, number) for one in taken for number in sorted(one.orders)):
            order, state = machine.draws_aside.get(number, (part, NONE))
            if differs(state) and order.node not in seen and _orders_items(order):
                seen.add(order.node)
                yield order, part


def _orders_items(draw: Placed) -> bool:
    """Return whether a stream gives its items in the order that is drawn: not one item in an order of its own."""
    body, call = draw.module.body_around(draw.node), draw.node
    if not isinstance(call, ast.Call):
        return False
    in_place = {ast.unparse(one) for one in call.args[:1]} if last_name(call.func) == "shuffle" else set()
    given: list[ast.expr] = []
    for node in descend(body):
        if isinstance(node, ast.YieldFrom):
            given.append(node.value)
        elif isinstance(node, ast.For) and any(isinstance(one, (ast.Yield, ast.YieldFrom)) for one in descend(node)):
            given.append(node.iter)
        elif isinstance(node, ast.Return) and node.value is not None and getattr(body, "name", "") == "__iter__":
            given.append(node.value)
    parts = (part for one in given for part in made_from(one, body))
    return any(part is call or (isinstance(part, ast.expr) and ast.unparse(part) in in_place) for part in parts)


def unshared_draw(projection: Projection, event: Event) -> Draw | None:
    """Return the draw that a call makes when its numbers certainly differ between ranks."""
    machine = projection.machine
    state = state_at(machine, event)
    if state is None or not differs(state):
        return None
    calls = [one for one in projection.of_kind("call", "training") if one.ordinal < event.ordinal]
    seed = seed_before(machine, state)
    if seed is None and is_by_rank(state):
        return Draw(event, next((one for one in reversed(calls) if _seeds_by_rank(one)), None))
    return Draw(event, next((one for one in calls if one.node is seed), None))


def seeds_of(projection: Projection, library: Library) -> list[Event]:
    """Return the calls that fix the random numbers of a library, or by their names may."""
    return [event for event in projection.of_kind("call", "training") if _seeds(event, library)]


def draw_of_samples(projection: Projection, dataset: Value) -> Draw | None:
    """Return a draw that chooses the samples of a data set, or puts them in order, differently on each rank.

    Not one that divides them: that is told of as a split.
    """
    machine = projection.machine
    orders = {number for kind, number in _tags_held(machine, dataset) if kind == ORDER}
    for event in projection.in_course("call") if orders else ():
        is_made = _draws(event) and not orders.isdisjoint(machine.numbers_of(event.node)) and _on_every_rank(event)
        if is_made and not _divides(projection, event) and not _shared_after(projection, event):
            return unshared_draw(projection, event)
    return None


def _draws(event: Event) -> bool:
    """Return whether a call draws random numbers; of the methods that are called so, those of a data set that was read.

    A stream is shuffled in a buffer, which knows no parts.
    """
    if event.name not in DATA_METHODS or _by_own_generator(event):
        return event.name in ORDERS or _by_own_generator(event)
    call, module = event.node, event.module
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or "buffer_size" in event.named:
        return False
    body = module.body_around(call)
    made = [node for node in made_from(call.func.value, body) if isinstance(node, ast.Call)]
    read = [node for node in made if _TABLES.match(module.resolve(node.func))]
    return bool(read) and not any(entry.arg == "streaming" for node in read for entry in node.keywords)


def _by_own_generator(event: Event) -> bool:
    """Return whether a method of a generator with other numbers on each rank puts something in an order."""
    return event.name in ORDERING_METHODS and event.receiver is not None and draws_by_itself(event.receiver)


def _is_divided_later(projection: Projection, event: Event) -> bool:
    """Return whether ranks take their parts of something after a call, by a DistributedSampler or in a Trainer."""
    return any(
        later.ordinal > event.ordinal and (later.kind == "sampler" or is_training_by_trainer(later))
        for later in projection.in_course("sampler", "collective")
    )


def _on_every_rank(event: Event) -> bool:
    return event.ranks == ALL_RANKS and not event.guards and event.complete


def _seeds(event: Event, library: Library) -> bool:
    head, last = event.name.partition(".")[0], event.name.rpartition(".")[2]
    if head != library and head in {"torch", "numpy", "random"}:
        return False
    if not SEEDING.search(last) or last in {"initial_seed", "get_seed"}:
        return False
    return not (isinstance(event.receiver, ExternalObject) and event.receiver.name == "torch.Generator")


def _seeds_by_rank(call: Event) -> bool:
    given = (*call.positional, *call.named.values())
    return call.name.rpartition(".")[2] in TAKES_SEED and call.ranks == ALL_RANKS and any(map(is_own_seed, given))


def _shared_after(projection: Projection, event: Event) -> bool:
    """Return whether the ranks may agree on something between a draw and the training that it is drawn for."""
    trained = min(
        (one.ordinal for one in projection.in_course("backward") if one.ordinal > event.ordinal), default=None
    )
    return any(
        later.ordinal > event.ordinal and later.name in _SHARED_LATER and (trained is None or later.ordinal < trained)
        for later in projection.of_kind("collective")
    )


def _splits(event: Event) -> bool:
    """Return whether the result of a draw divides a data set."""
    if event.name in _SPLITS:
        shuffle = event.named.get("shuffle", NONE)
        return constant(shuffle) is not False
    body = event.module.body_around(event.node)
    return len(_slices(event, body)) >= 2 and _makes_subsets(event.module, body)


def _divides(projection: Projection, event: Event) -> bool:
    """Return whether the result of a draw divides a data set where it is drawn, or its pieces feed several loaders."""
    if _splits(event):
        return True
    machine = projection.machine
    order = {(ORDER, number) for number in machine.numbers_of(event.node)}
    fed: list[frozenset[Tag]] = []
    for loader in projection.in_course("loader"):
        tags = _tags_held(machine, loader.argument("dataset", 0) or NONE)
        pieces = frozenset(tag for tag in tags if tag[0] in (PIECE, PIECES))
        if tags & order and pieces and loader.receiver is None:
            fed.append(pieces)
    return any(one != other or any(kind == PIECES for kind, _ in one) for one, other in itertools.combinations(fed, 2))


def _tags_held(machine: Machine, dataset: Value, depth: int = 0) -> frozenset[Tag]:
    """Return the origins of what a data set holds, and of what those hold that it is made of."""
    found, made = tags_of(dataset), machine.object(dataset)
    held = machine.store.held(dataset.number) if isinstance(dataset, Instance) else ()
    inner = (*held, *options_of(dataset)) if made is None else (*made.positional, *made.named.values())
    if depth < _DEEPEST:
        found = found.union(*(_tags_held(machine, one, depth + 1) for one in inner if one != dataset))
    return found


def _is_taken_by_rank(projection: Projection, event: Event) -> bool:
    """Return whether each rank takes a part of what a draw has put in order, by its number."""
    ranks = rank_names(projection.machine.store)
    body, drawn_at = event.module.body_around(event.node), getattr(event.node, "lineno", 0)
    return any(
        subscript.lineno >= drawn_at
        and any(
            last_name(node) in ranks or (isinstance(node, ast.Constant) and node.value == "RANK")
            for limit in (limits.lower, limits.step)
            if limit is not None
            for node in made_from(limit, body)
        )
        for subscript, limits in _slices(event, body)
    )


def _slices(event: Event, body: ast.AST) -> list[tuple[ast.Subscript, ast.Slice]]:
    """Return where a body takes slices of the variable that a draw fills."""
    name = _drawn_name(event)
    return [
        (node, node.slice)
        for node in descend(body)
        if name
        and isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Slice)
        and ast.unparse(node.value) == name
    ]


def _drawn_name(event: Event) -> str:
    """Return the variable or attribute that a draw fills: the one assigned, or the list shuffled in place."""
    if event.name.endswith("shuffle") and isinstance(event.node, ast.Call) and event.node.args:
        target: ast.AST = event.node.args[0]
    else:
        statement = next((node for node in event.module.ancestors(event.node) if isinstance(node, ast.stmt)), None)
        if not isinstance(statement, ast.Assign):
            return ""
        target = statement.targets[0]
    return ast.unparse(target) if isinstance(target, (ast.Name, ast.Attribute)) else ""


def _makes_subsets(module: Module, body: ast.AST) -> bool:
    """Return whether a body takes parts of data sets, by torch's names or a project's of the same name."""
    return any(
        (module.resolve(node.func) or last_name(node.func) or "").rpartition(".")[2]
        in {"Subset", "SubsetRandomSampler", "DistributedSampler"}
        for node in descend(body)
        if isinstance(node, ast.Call)
    )
