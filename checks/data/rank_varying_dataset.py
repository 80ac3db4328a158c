"""Ranks build different data sets, and one sampler divides them as if they were the same.

What it finds
    A DistributedSampler over a subset whose indices depend on the rank, or that only some ranks take, over a data set
    whose constructor shuffles without a common seed, over samples that were drawn before without one, or that are the
    items of a set of texts in their order, or over one of
    Hugging Face that each rank shuffles with a seed of its own; that, too, where an Accelerator divides the loader.
    Loaders that are divided twice: by a DistributedSampler and Accelerate, a part of a rank by a sampler or framework.
    Or words or labels that each rank numbers in the order of a set of texts, or by `hash()` of texts or `id()`, and
    gives a model of DDP by these numbers; or a seed or a split that depends on such a hash. In a run: data sets of
    different lengths, different subsets, the same rows in different orders, or samples that are left out because two
    samplers divide by rank.

Why it is bad
    The sampler gives each rank its part of the *indices*, assuming that an index means the same sample everywhere.
    Over a subset that is already divided each rank sees a part of its part, and most samples are never used. Over data
    in a different order on each rank some samples are seen several times and others never.

Example
    part = Subset(dataset, range(rank, len(dataset), world_size))
    loader = DataLoader(part, sampler=DistributedSampler(part))

Remedy
    Divide once: either by rank and with shuffle=True, or the whole data set with the sampler. Seed the shuffle.

When it is wrong
    If the sampler is given a number of replicas other than the number of ranks; that is recognised.

References
    https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import partial

from ddpdoctor.check import Check, Script, Verdict
from ddpdoctor.checks.data.unseeded_random_split import draw_of_samples
from ddpdoctor.finding import Finding, Location, Severity
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.attributes import class_attribute
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    ALL_RANKS,
    NONE,
    ExternalObject,
    Function,
    Instance,
    PerRank,
    Value,
    constant,
    is_guessed,
    is_varying,
    options_of,
    tags_of,
)
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.training_loops import is_map_style, sampler_division, samplers_of, takes_own_part
from ddpdoctor.source.ranks.random_numbers import DATA_METHODS
from ddpdoctor.source.ranks.ranks import rank_names
from ddpdoctor.source.script.module import descend, last_name
from ddpdoctor.source.script.script import calls_any, makes_sets
from ddpdoctor.source.vocabulary import DISTRIBUTED_SAMPLER

CHECK = Check(
    code="DDP108",
    name="rank-varying-dataset",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.WARNING),
    needs=frozenset({"loaders", "passes", "parts", "holdings"}),
    subjects=("sampler",),
    triggers=("DistributedSampler", "ccelerat", "DistributedDataParallel", "Fabric", "ightning", "deepspeed"),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report samplers over data sets that differ between ranks."""
    projection = whole_projection(script)
    yield from CHECK.suspected(rank_datasets(projection))
    if makes_sets(script) or calls_any(script, ("hash", "id")):
        from ddpdoctor.checks.data.numbering_source import numbered_apart

        yield from CHECK.suspected(numbered_apart(projection))


in_run = CHECK.judged_by("checks.data.samples_run", "judge_rank_data")


_PARTS = "Give the sampler the whole data set: it divides it in parts of one length."
_WHOLE = "Give the loader the whole data set: the framework gives each rank its part."
NO_SAMPLER = "Leave the DistributedSampler out, with shuffle=True in its place: prepare divides the batches itself."
_SEED = "Seed every rank with the same number before the data set is built."
_SHUFFLE = "Shuffle it with the same seed on every rank."
_ALIKE = "Give the sampler the same data set on every rank."


def rank_datasets(projection: Projection) -> Iterator[Verdict]:
    """Every DistributedSampler or prepared loader over a data set that certainly differs between ranks."""
    seen: set[ast.AST] = set()
    for sampler in projection.in_course("sampler"):
        if sampler.name != DISTRIBUTED_SAMPLER or sampler.node in seen or sampler.ranks != ALL_RANKS:
            continue
        if not sampler.complete or len(sampler.positional) > 1 or {"num_replicas", "rank"} & sampler.named.keys():
            continue
        dataset = sampler.argument("dataset", 0)
        options = list(options_of(dataset)) if dataset is not None else []
        cut = _cut_on_some(projection.machine, dataset)
        if cut is not None:
            seen.add(sampler.node)
            what = "this sampler divides a data set of which some ranks have a part only"
            yield _differs(sampler, _ALIKE, cut, "only some ranks take this part of it", what)
        if len(options) != 1:
            continue
        found = _judge(projection, sampler, options[0])
        if found is not None:
            seen.add(sampler.node)
            yield found
    for loader in projection.of_kind("loader"):
        found = _divided_twice(projection, loader) if loader.node not in seen else None
        if found is not None:
            seen.add(loader.node)
            yield found
    for loader in projection.in_course("loader"):
        if loader.ordinal in projection.machine.prepared and loader.node not in seen:
            shuffle = _shuffled_apart(projection, loader, loader.argument("dataset", 0))
            if shuffle is not None:
                seen.add(loader.node)
                yield _differs(loader, _SHUFFLE, shuffle)


def _cut_on_some(machine: Machine, dataset: Value | None) -> Event | None:
    """Return the subset that some ranks take of what the others have whole."""
    if not isinstance(dataset, PerRank) or dataset.guessed:
        return None
    for lane in dataset.values:
        made = machine.object(lane)
        if made is not None and made.name == "torch.utils.data.Subset":
            whole = made.argument("dataset", 0)
            return made if isinstance(whole, (ExternalObject, Instance)) and whole in dataset.values else None
    return None


def _differs(
    divided: Event, remedy: str, cause: Event, why: str = "this depends on the rank", what: str = ""
) -> Verdict:
    divides = "sampler divides" if divided.kind == "sampler" else "loader, which the Accelerator divides, is of"
    return Verdict(
        sentence=what or f"this {divides} a data set whose order differs between ranks",
        remedy=remedy,
        locations=divided.location,
        because=(why, cause.location),
    )


# Of Accelerate: it divides the batches of any sampler. Other frameworks leave a DistributedSampler as it is.
_DIVIDES_BATCHES = frozenset({"prepare", "prepare_data_loader"})


def _divided_twice(projection: Projection, loader: Event) -> Verdict | None:
    """Judge a loader that a framework divides, whose sampler or data are divided by rank already on every path."""
    machine = projection.machine
    if loader.ordinal not in machine.prepared or loader.ranks != ALL_RANKS or loader.guards:
        return None
    made = [loader if loader.receiver is None else machine.object(one) for one in options_of(loader.receiver or NONE)]
    given = [one for one in made if one is not None and one.kind == "loader"]
    if not given or len(given) < len(made):
        return None
    maker = machine.maker_of(loader.ordinal)
    call = maker[0] if isinstance(maker, tuple) else loader.node
    name = last_name(call.func) if isinstance(call, ast.Call) else ""
    keys = (("sampler", 3), ("batch_sampler", 4))
    samplers = [[value for key in keys if (value := one.argument(*key)) not in (None, NONE)] for one in given]
    if name in _DIVIDES_BATCHES and all(map(partial(_divide_by_rank, machine), samplers)):
        cause = next((one for value in samplers[0] for one in samplers_of(machine, value)), given[0])
        why, remedy = f"this sampler divides the samples by rank, and {name} divides its batches again", NO_SAMPLER
    elif all(_is_part(machine, one, any_form=name in _DIVIDES_BATCHES) for one in given):
        cause, remedy = given[0], _WHOLE
        why = "its data are one rank's part already, and the framework divides them again"
    else:
        return None
    return Verdict(
        sentence="this loader is divided by rank twice: N ranks together draw the N-th part of the samples in a pass",
        remedy=remedy,
        locations=tuple(dict.fromkeys((loader.module.location(call), given[0].location))),
        because=((why, cause.location),),
    )


def _divide_by_rank(machine: Machine, samplers: Sequence[Value]) -> bool:
    options = [one for value in samplers for one in options_of(value)]
    return bool(options) and all(sampler_division(machine, one) == "sharded" for one in options)


def _is_part(machine: Machine, loader: Event, *, any_form: bool) -> bool:
    """Return whether a loader's data are certainly a rank's part, which has an index if only such are divided."""
    dataset = loader.argument("dataset", 0) or NONE
    indexed = any_form or constant(loader.argument("shuffle", 2) or NONE) is True or is_map_style(machine, dataset)
    return indexed and all(takes_own_part(machine, one, cut=True) for one in options_of(dataset))


def _judge(projection: Projection, sampler: Event, dataset: Value) -> Verdict | None:
    draw = draw_of_samples(projection, dataset)
    if draw is not None:
        return _differs(sampler, _SEED, draw.event, "no common seed fixes this")
    taken = _taken_from_set(projection.machine, dataset)
    if taken is not None:
        return Verdict(
            sentence="this sampler divides a data set in the order of a set, which is another one in every process",
            remedy="Sort what the set holds: sorted(...) gives every rank the same order.",
            locations=sampler.location,
            because=("an item is taken by its number in that order", taken),
        )
    made = projection.machine.object(dataset)
    if made is not None and made.name == "torch.utils.data.Subset" and _by_rank(projection, made):
        return _differs(sampler, _PARTS, made, what="this sampler divides a subset that is already one rank's part")
    if takes_own_part(projection.machine, dataset, cut=True):
        what = "this sampler divides data that are already one rank's part"
        return _differs(sampler, _PARTS, sampler, "they were cut by rank before", what)
    shuffle = _shuffled_apart(projection, sampler, dataset)
    return None if shuffle is None else _differs(sampler, _SHUFFLE, shuffle)


def _taken_from_set(machine: Machine, dataset: Value) -> Location | None:
    """Return where a data set takes an item by its number from a list in the order of a set of texts."""
    script = machine.script
    item = class_attribute(machine, dataset.cls, "__getitem__") if isinstance(dataset, Instance) else None
    module = script.module(item.module) if isinstance(item, Function) else None
    if module is None or not isinstance(item, Function) or not makes_sets(script):
        return None
    from ddpdoctor.source.queries.set_order import SetOrders, fixes_order

    orders, numbers = SetOrders(script.modules), {one.arg for one in item.node.args.args[1:]}
    taken = (one for one in descend(item.node) if isinstance(one, ast.Subscript) and last_name(one.slice) in numbers)
    lost = (one for one in taken if orders.is_lost(module, one.value) and not fixes_order(script))
    return next(map(module.location, lost), None)


def _shuffled_apart(projection: Projection, divided: Event, dataset: Value | None) -> Event | None:
    """Return the call of ``shuffle`` that gave a data set of Hugging Face an order by a seed of the rank's own."""
    if dataset is None or ("drawn", 0) not in tags_of(dataset):
        return None
    shuffles = [
        event
        for event in projection.in_course("call")
        if event.name in DATA_METHODS and event.ordinal < divided.ordinal and is_varying(event.named.get("seed", NONE))
    ]
    return shuffles[-1] if shuffles else None


def _by_rank(projection: Projection, made: Event) -> bool:
    """Return whether the indices of a subset are computed from the rank where it is built, or one assignment before."""
    indices = made.argument("indices", 1)
    if indices is None or not is_varying(indices) or (isinstance(indices, PerRank) and is_guessed(indices)):
        return False
    if not isinstance(made.node, ast.Call):
        return False
    names = {node.id for node in descend(made.node) if isinstance(node, ast.Name)}
    texts: list[ast.AST] = [made.node, *(one.value for one in made.module.assigning(made.module.tree, *names))]
    ranks = rank_names(projection.machine.store)
    return any(_speaks_of_rank(node, ranks) for text in texts for node in descend(text))


def _speaks_of_rank(node: ast.AST, ranks: frozenset[str]) -> bool:
    return last_name(node) in ranks or (isinstance(node, ast.Constant) and node.value == "RANK")
