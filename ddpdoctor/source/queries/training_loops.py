"""Which loaders feed the training of a DDP model, and how they divide the data between ranks."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from typing import Literal

import msgspec

from ddpdoctor.files import regex
from ddpdoctor.source.events import Event, LoopAround
from ddpdoctor.source.interpreter.attributes import base_names, bases_of, class_attribute
from ddpdoctor.source.interpreter.loops import item_aside
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    ALL_RANKS,
    NONE,
    OWN_FOLDER,
    External,
    ExternalObject,
    Function,
    Instance,
    OneOf,
    PerRank,
    ProjectClass,
    SequenceValue,
    Unknown,
    Value,
    constant,
    is_varying,
    options_of,
    tags_of,
)
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.wrapped_models import loop_nodes, stepped, training_events, wrap_numbers
from ddpdoctor.source.ranks.data_partitions import PART, SHARE
from ddpdoctor.source.ranks.random_numbers import DRAWN_UNSEEDED, is_found_alike, seeds_by_rank
from ddpdoctor.source.ranks.rank_local_values import LISTED, LISTING
from ddpdoctor.source.script.module import Module, all_once, descend, last_name, made_from
from ddpdoctor.source.script.script import code_of
from ddpdoctor.source.torch_model.ddp import SHARDED_TAGS
from ddpdoctor.source.torch_model.recorded_calls import UNWRAPPED_FORWARD
from ddpdoctor.source.vocabulary import DATA_LOADER, DISTRIBUTED_SAMPLER, MAP_STYLE_DATASETS, text_hints_at_ranks

Division = Literal["sharded", "whole", "unknown"]
"""Each rank gets its part, each rank gets everything, or it is not known."""

_WHOLE_SAMPLERS = frozenset(
    f"torch.utils.data.{name}"
    for name in ("RandomSampler", "SequentialSampler", "SubsetRandomSampler", "WeightedRandomSampler")
)
_RANK_WORDS = frozenset(
    {"rank", "get_rank", "RANK", "LOCAL_RANK", "local_rank", "world_size", "get_world_size", "shard"}
)


# Words for the part of a rank, in the class of a sampler.
_SHARES = regex(r"shard|replica|world|process|worker", re.IGNORECASE)
_FORWARDS = ("bare forward", UNWRAPPED_FORWARD)


class Feeding(msgspec.Struct, frozen=True, eq=False):
    """A loader that feeds a backward of a DDP model."""

    loader: Event
    backward: Event
    loop: LoopAround | None
    """The loop over the loader, when it is one."""
    alternatives: tuple[Event, ...]
    """Loaders that may stand in its place, itself included."""
    certain: bool
    """Nothing else than these loaders can stand there."""


@all_once
def feedings(projection: Projection) -> Iterator[Feeding]:
    """Yield every loader whose batches reach a backward whose gradients are averaged, once."""
    seen: set[int] = set()
    wrapped = any(projection.of_kind("wrap"))
    for backward in projection.in_course("backward"):
        by_ddp = is_averaged(projection, backward)
        if wrapped and not by_ddp and unread_loss(projection, backward) is None:
            continue
        for loop, numbers, certain in _sources(projection.machine, backward, by_loss=by_ddp or not wrapped):
            if not _is_stepped(projection, backward, loop):
                continue
            events = tuple(
                event for number in sorted(numbers) if (event := projection.machine.events.get(number)) is not None
            )
            for loader in events:
                if not by_ddp and not wrapped and division(projection.machine, loader) != "sharded":
                    continue  # In a job without DDP a loader that is divided by rank shows its purpose.
                # One that the parent makes may train there: a script that spawns ranks on request.
                if loader.ordinal not in seen and not (loader.in_parent and backward.in_parent):
                    seen.add(loader.ordinal)
                    yield Feeding(loader, backward, loop, events, certain)


def loop_of_epochs(feeding: Feeding) -> LoopAround | None:
    """Return the innermost loop around the loop over the loader that makes more than one turn."""
    if feeding.loop is None:
        return None
    position = next(i for i, loop in enumerate(feeding.backward.loops) if loop is feeding.loop)
    outer = [loop for loop in feeding.backward.loops[:position] if not loop.once]
    return outer[-1] if outer else None


def _is_stepped(projection: Projection, backward: Event, loop: LoopAround | None) -> bool:
    """Return whether an optimizer may use the gradients of a backward: those of an attack are cleared before it steps.

    It steps in the loop over the batches, or behind it, before anything clears what they have summed up.
    """
    asked = list(training_events(projection, "step", "zero_grad"))
    around = set(loop_nodes(backward))
    inside = {loop.node} if loop is not None else around
    if not any(map(stepped, asked)) or any(one.name == "step" and inside & set(loop_nodes(one)) for one in asked):
        return True
    known = [one for one in asked if one.name == "zero_grad" or stepped(one)]
    later = [one for one in known if one.ordinal > backward.ordinal]
    again = [one for one in known if around & set(loop_nodes(one))]
    following = min(later or again, key=lambda one: one.ordinal, default=None)
    return following is not None and following.name == "step"


def division(machine: Machine, loader: Event) -> Division:
    """Return how a loader divides its data set between the ranks."""
    if loader.ordinal in machine.prepared:
        return "sharded"
    if not loader.complete or loader.ranks != ALL_RANKS or is_varying(loader.argument("generator") or NONE):
        return "unknown"
    for name, position in (("batch_sampler", 4), ("sampler", 3)):
        sampler = loader.argument(name, position)
        if sampler is not None and constant(sampler) is not None:
            return sampler_division(machine, sampler)
    dataset = loader.argument("dataset", 0)
    if dataset is None or divided_by_rank(machine, dataset):
        return "unknown"
    shuffles = constant(loader.argument("shuffle", 2) or NONE) is True
    return "whole" if shuffles or is_map_style(machine, dataset) else "unknown"


def sampler_division(machine: Machine, sampler: Value) -> Division:
    """Return how a sampler divides a data set; of several that it may be, the best division counts."""
    found: set[Division] = {_one_sampler(machine, option) for option in options_of(sampler)}
    if "sharded" in found:
        return "sharded"
    return "unknown" if "unknown" in found or is_varying(sampler) else "whole"


def samplers_of(machine: Machine, value: Value) -> Iterator[Event]:
    """Yield the DistributedSamplers in a sampler or batch sampler."""
    for option in options_of(value):
        if isinstance(option, Instance):
            derived_from = _as_sampler(machine, option)
            if derived_from is not None and _goes_by_epoch(machine, option):
                yield derived_from
            yield from _samplers_iterated(machine, option)
        made = machine.object(option)
        if made is None:
            continue
        if made.name == DISTRIBUTED_SAMPLER:
            yield made
        elif made.name == "torch.utils.data.BatchSampler":
            yield from samplers_of(machine, made.argument("sampler", 0) or NONE)


def _as_sampler(machine: Machine, value: Instance) -> Event | None:
    """Return the construction of a DistributedSampler in an object of a class that derives from it."""
    made = machine.events.get(value.number)
    return made if made is not None and made.kind == "sampler" else None


def _goes_by_epoch(machine: Machine, sampler: Instance) -> bool:
    """Return whether the order of an own sampler follows the epoch that it is given and does not count itself."""
    turns = class_attribute(machine, sampler.cls, "__iter__")
    if not isinstance(turns, Function):
        return True
    used = [
        node for node in descend(turns.node) if isinstance(node, ast.Attribute) and node.attr in ("epoch", "__iter__")
    ]
    return bool(used) and all(isinstance(node.ctx, ast.Load) for node in used)


def _samplers_iterated(machine: Machine, sampler: Instance) -> Iterator[Event]:
    """Yield the DistributedSamplers that a sampler of the project goes over: one that makes batches of their items."""
    turns = class_attribute(machine, sampler.cls, "__iter__")
    inside = descend(turns.node) if isinstance(turns, Function) else ()
    used = {node.attr for node in inside if isinstance(node, ast.Attribute)}
    for name in machine.store.names(sampler.number):
        held = machine.store.get(sampler.number, name) if name in used else None
        if held is not None and not isinstance(held, Instance):
            yield from samplers_of(machine, held)


def _one_sampler(machine: Machine, option: Value) -> Division:
    if constant(option) is None:
        return "whole"
    made = machine.object(option)
    if made is None and isinstance(option, Instance):
        if _as_sampler(machine, option) is not None and _orders_anew(machine, option):
            return "whole" if _knows_no_ranks(machine, option) else "unknown"
        if (
            _as_sampler(machine, option) is not None
            or any(_samplers_iterated(machine, option))
            or takes_own_part(machine, option)
        ):
            return "sharded"
        return "whole" if _knows_no_ranks(machine, option) else "unknown"
    if made is None:
        return "unknown"
    if made.name == DISTRIBUTED_SAMPLER:
        return "whole" if constant(made.argument("num_replicas", 1) or NONE) == 1 else "sharded"
    if any(is_varying(where_there(value)) for value in made.values):
        return "unknown"
    if made.name == "torch.utils.data.BatchSampler":
        return sampler_division(machine, made.argument("sampler", 0) or Unknown())
    if made.name in _WHOLE_SAMPLERS:
        dataset = made.argument("data_source", 0)
        return "unknown" if dataset is None or divided_by_rank(machine, where_there(dataset)) else "whole"
    return "unknown"


def where_there(value: Value) -> Value:
    """Return what the ranks have of which some have nothing: ``test_set if rank == 0 else None``."""
    lanes = [lane for lane in value.values if lane != NONE] if isinstance(value, PerRank) else []
    return lanes[0] if lanes and all(lane == lanes[0] for lane in lanes) else value


_SAME_FOR_RANKS = frozenset({"random.Random", "torch.Generator", "numpy.random.RandomState", "numpy.random.Generator"})
"""Objects that know of no ranks but by their seeds."""


_OF_THE_SYSTEM = frozenset({"SystemRandom", "urandom", "secrets", "getpid", "time", "time_ns"})
"""What gives each process numbers of its own."""


def _orders_anew(machine: Machine, sampler: Instance) -> bool:
    """Return whether a class that derives from DistributedSampler goes through the data in a way of its own, and takes
    nothing of what torch's divides by.
    """
    turns = class_attribute(machine, sampler.cls, "__iter__")
    if not isinstance(turns, Function):
        return False
    used = {node.attr for node in descend(sampler.cls.node) if isinstance(node, ast.Attribute)}
    by_length = any(
        isinstance(node, ast.Call)
        and last_name(node.func) == "len"
        and any(last_name(one) == "self" for one in node.args)
        for node in descend(turns.node)
    )
    own_length = any(getattr(one, "name", "") == "__len__" for one in sampler.cls.node.body)
    return not used & {"num_samples", "total_size", "__iter__"} and (own_length or not by_length)


def _knows_no_ranks(machine: Machine, sampler: Instance) -> bool:
    """Return whether a sampler of the project gives every rank the same: neither its class nor what it holds speaks of
    ranks, and it derives from nothing else than a sampler of torch.
    """
    bases = list(bases_of(machine, sampler.cls))
    of_torch = (External("torch.utils.data.Sampler"), External(DISTRIBUTED_SAMPLER))
    if not bases or any(base not in of_torch for base in bases):
        return False
    words = {last_name(node) for node in descend(sampler.cls.node) if isinstance(node, (ast.Attribute, ast.Name))}
    helpers = (one for module in machine.script.modules for one in module.index.of(ast.FunctionDef))
    if words & _OF_THE_SYSTEM or any(one.name in words and _mentions_ranks(one) for one in helpers):
        return False
    names, held = machine.store.names(sampler.number), machine.store.held(sampler.number)
    if seeds_by_rank(machine) or any(map(is_varying, held)) or any("sampler" in name for name in names):
        return False
    objects = (option for value in held for option in options_of(value) if isinstance(option, ExternalObject))
    made = machine.events.get(sampler.number)
    if any(divided_by_rank(machine, value) for value in (*held, *(made.values if made is not None else ()))):
        return False
    if any(one.name not in _SAME_FOR_RANKS and not is_map_style(machine, one) for one in objects):
        return False  # It may take what another sampler gives it.
    text = code_of(sampler.cls.node)
    return not _mentions_ranks(sampler.cls.node) and not text_hints_at_ranks(text) and not _SHARES.search(text)


def through_ddp(projection: Projection, backward: Event) -> bool:
    """Return whether what a backward starts from was computed by a DDP model."""
    wraps = wrap_numbers(backward.receiver)
    return any(event.ordinal in wraps for event in projection.of_kind("wrap"))


def by_engine(backward: Event) -> bool:
    """Return whether DeepSpeed's engine runs a backward."""
    return backward.receiver is not None and any(kind == "engine" for kind, _ in tags_of(backward.receiver))


def by_shards(backward: Event) -> bool:
    """Return whether a model that is sharded over all ranks, each with data of its own, runs a backward."""
    return backward.receiver is not None and any(kind == SHARDED_TAGS[0] for kind, _ in tags_of(backward.receiver))


def is_averaged(projection: Projection, backward: Event) -> bool:
    """Return whether the gradients of a backward are averaged over ranks that train on data of their own."""
    return through_ddp(projection, backward) or by_engine(backward) or by_shards(backward)


def unread_loss(projection: Projection, backward: Event) -> ast.AST | None:
    """Return the call that a loss comes from and that was not followed: the DDP model may have been run in it."""
    body = backward.module.body_around(backward.node)
    return next((node for node in made_from(backward.node, body) if node in projection.machine.unread), None)


def _sources(machine: Machine, backward: Event, *, by_loss: bool) -> Iterator[tuple[LoopAround | None, set[int], bool]]:
    """Yield the loops around a backward that run over loaders, or else the loaders that its loss comes from."""
    found = False
    for loop in backward.loops:
        for part in _side_by_side(loop.iterable):
            numbers, certain = _loaders_in(machine, part)
            if numbers:
                found = True
                yield loop, numbers, certain
    if not found and by_loss and backward.receiver is not None:
        yield None, {number for kind, number in tags_of(backward.receiver) if kind == "batch"}, True


def _side_by_side(iterable: Value) -> Iterator[Value]:
    """Yield what a loop goes over in step: the parts of a ``zip``, or the one thing that it goes over."""
    one = isinstance(iterable, SequenceValue) and iterable.open and len(iterable.values) == 1
    item = iterable.values[0] if one else None  # type: ignore[union-attr]
    if not isinstance(item, SequenceValue) or item.open:
        yield iterable
        return
    for part in item.values:
        if isinstance(part, SequenceValue):
            yield from part.values
        else:
            yield part


def _loaders_in(machine: Machine, iterable: Value) -> tuple[set[int], bool]:
    numbers = {number for kind, number in tags_of(iterable) if kind in ("loader", "batch")}
    certain = True
    items = iterable.values if isinstance(iterable, SequenceValue) and iterable.open else ()
    for item in items:
        if isinstance(item, Instance):  # Batches that a generator hands on as objects of the project.
            held = machine.store.held(item.number)
            numbers |= {number for one in held for kind, number in tags_of(one) if kind == "batch"}
    for option in options_of(iterable):
        if isinstance(option, ExternalObject) and option.name == DATA_LOADER:
            numbers.add(option.number)
        elif option != SequenceValue(()) and not tags_of(option) and not items and constant(option) is not None:
            certain = False  # Nothing comes out of an empty list, which is filled later.
    return numbers, certain


def divided_by_rank(machine: Machine, dataset: Value) -> bool:
    """Return whether a data set may hold something else on each rank."""
    if is_varying(dataset):
        return True
    if isinstance(dataset, OneOf):
        return any(divided_by_rank(machine, option) for option in dataset.options)
    if isinstance(dataset, Instance):
        own = [value for value in machine.store.held(dataset.number) if is_varying(value)]
        if own and all(map(is_found_alike, own)) and _lists_by_itself(machine, dataset.cls):
            own = []
        return bool(own) or _mentions_ranks(dataset.cls.node) or takes_own_part(machine, dataset)
    made = machine.object(dataset)
    if made is None:
        return False
    return any(
        is_varying(part)
        or SHARE in tags_of(part)
        or (isinstance(part, (ExternalObject, Instance)) and divided_by_rank(machine, part))
        for part in made.values
    )


def takes_own_part(machine: Machine, dataset: Value, *, cut: bool = False) -> bool:
    """Return whether what a data set gives was followed to a cut by rank.

    With ``cut`` not just to a device of it, nor to a file of the same name in a folder of the rank's own.
    """
    waiting, seen = [dataset], set[int]()
    while waiting:
        one = waiting.pop()
        item = one
        if isinstance(one, Instance) and one.number not in seen:
            seen.add(one.number)
            item = item_aside(machine, one)
        elif (made := machine.object(one)) is not None and made.ordinal not in seen:
            seen.add(made.ordinal)
            waiting += made.values
        tags = tags_of(item)
        whole = item is not one or OWN_FOLDER in tags
        if SHARE in tags and (not cut or not whole or any(kind == PART for kind, _ in tags)):
            return True
    return False


def _lists_by_itself(machine: Machine, cls: ProjectClass) -> bool:
    """Return whether a class of data sets lists the files itself, in a class or a module that knows no ranks.

    Else what lists them may have kept those of the rank.
    """
    module = machine.script.module(cls.module)
    if module is None:
        return False
    places = [cls.node] if module is machine.script.entry or _mentions_ranks(module.tree) else [cls.node, module.tree]
    return any(
        LISTING.match(module.resolve(call.func)) for place in places for call in module.index.within(place, ast.Call)
    )


def is_drawn(machine: Machine, loader: Event) -> bool:
    """Return whether a loader's data are random numbers that nothing seeds: each rank has its own."""
    made = machine.object(loader.argument("dataset", 0) or NONE)
    tensors = made.positional if made is not None and made.name == "torch.utils.data.TensorDataset" else ()
    return any(DRAWN_UNSEEDED in tags_of(one) for one in tensors)


def _mentions_ranks(node: ast.AST) -> bool:
    for inner in descend(node):
        word = inner.id if isinstance(inner, ast.Name) else inner.attr if isinstance(inner, ast.Attribute) else ""
        if word in _RANK_WORDS or (isinstance(inner, ast.Constant) and inner.value in _RANK_WORDS):
            return True
        if isinstance(inner, ast.arg) and inner.arg in _RANK_WORDS:
            return True
    return False


def is_map_style(machine: Machine, dataset: Value) -> bool:
    """Return whether a value is a data set whose items have numbers."""
    if isinstance(dataset, OneOf):
        return all(is_map_style(machine, option) for option in dataset.options)
    if isinstance(dataset, ExternalObject):
        return MAP_STYLE_DATASETS.match(dataset.name) is not None
    if isinstance(dataset, Instance):
        bases = base_names(machine, dataset.cls)
        if any("Iterable" in name for name in bases):
            return False
        if any(map(MAP_STYLE_DATASETS.match, bases)):
            return True
        return machine.store.get(dataset.cls.scope, "__getitem__") is not None
    return False


def evaluating_forwards(projection: Projection) -> Iterator[Event]:
    """Yield the forwards without gradients of the model that is trained: where DDP holds one, it is that one."""
    outside = "bare forward" if any(projection.of_kind("wrap")) else UNWRAPPED_FORWARD
    for event in forwards_without_gradients(projection):
        if event.kind == "ddp-forward" or event.name == outside:
            yield event


def forwards_without_gradients(projection: Projection) -> Iterator[Event]:
    """Yield the forwards without gradients of any model."""
    for event in projection.in_course("ddp-forward", "training"):
        if not event.gradients and (event.kind == "ddp-forward" or event.name in _FORWARDS):
            yield event


def takes_all_data(projection: Projection, loop: LoopAround) -> bool:
    """Return whether a loop goes over a whole loader, data set or folder: nothing in it counts what is enough."""
    if not isinstance(loop.node, (ast.For, ast.AsyncFor)) or _is_left_by_count(loop.module, loop.node):
        return False
    iterated = loop.node.iter
    if isinstance(iterated, ast.Call) and last_name(iterated.func) == "islice":
        return False
    data = any(is_map_style(projection.machine, value) for value in (loop.whole, loop.iterable))
    return data or LISTED in tags_of(loop.iterable) or only_loader(projection, loop) is not None


def _is_left_by_count(module: Module, loop: ast.For | ast.AsyncFor) -> bool:
    """Return whether a loop ends after some turns, whatever they are: by a number that it counts, or at once."""
    counters = {node.id for node in descend(loop.target) if isinstance(node, ast.Name)} | {
        last_name(node.target) for node in module.index.within(loop, ast.AugAssign)
    }
    for leave in (*module.index.within(loop, ast.Break), *module.index.within(loop, ast.Return)):
        around = list(itertools.takewhile(lambda node: node is not loop, module.ancestors(leave)))
        if isinstance(leave, ast.Break) and any(isinstance(node, (ast.For, ast.While)) for node in around):
            continue  # It leaves a loop inside.
        tests = [node.test for node in around if isinstance(node, ast.If)]
        if not tests or any(last_name(name) in counters for test in tests for name in descend(test)):
            return True
    return False


def only_loader(projection: Projection, loop: LoopAround) -> Event | None:
    """Return the one loader that a loop certainly runs over."""
    numbers = {number for kind, number in tags_of(loop.iterable) if kind in ("loader", "batch")}
    for option in options_of(loop.iterable):
        if isinstance(option, ExternalObject) and option.name == DATA_LOADER:
            numbers.add(option.number)
        elif not tags_of(option):
            return None
    return projection.machine.events.get(numbers.pop()) if len(numbers) == 1 else None
