"""Shuffling DistributedSamplers that train for several epochs and are never told the epoch."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from typing import Literal

import msgspec

from ddpdoctor.source.events import Event, LoopAround
from ddpdoctor.source.interpreter.values import (
    ALL_RANKS,
    NONE,
    BoundMethod,
    Const,
    ExternalObject,
    Instance,
    constant,
    options_of,
)
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.training_loops import Feeding, feedings, samplers_of
from ddpdoctor.source.script.module import Module, last_name

# What to do where a batch sampler gives every rank the same batches: a loader takes no `sampler` beside it.

OF_TORCH = frozenset({"SequentialSampler", "RandomSampler", "torch.utils.data.BatchSampler"})
"""What torch's own batch sampler draws from, and itself: it divides as soon as its sampler does."""


def batches_remedy(sampler: str) -> str:
    """Return the remedy for a batch sampler of this name, or for torch's own one that draws from such a sampler."""
    if sampler in OF_TORCH:
        return (
            "Give the batch sampler DistributedSampler(dataset) as its sampler, and call set_epoch(epoch) of that one "
            "before every epoch."
        )
    return (
        f"Let {sampler} give each rank its own batches, as many as the others: "
        "batches[rank : len(batches) // world_size * world_size : world_size], of an order that is the same on all "
        "ranks."
    )


TORCHS_ORDERS = frozenset({"", "SequentialSampler", "RandomSampler"})
"""Samplers that choose nothing, by their classes; empty where a loader has none."""


def samples_remedy(sampler: str, order: str, *, divides: bool) -> str:
    """Return the remedy for a loader with a sampler of this class, or with torch's own order, as it was asked for.

    ``order`` is empty where none was asked for. ``divides`` says that the sampler divides, as it was told, and not by
    the rank.
    """
    if divides:
        return (
            f"Give {sampler} the rank and the number of ranks of the process group; DistributedSampler takes them "
            "from the process group by default."
        )
    if sampler in TORCHS_ORDERS:
        return (
            f"Give it sampler=DistributedSampler(dataset){f' instead of {order}' if order else ''}, and call "
            "sampler.set_epoch(epoch) before each epoch."
        )
    return (
        f"Let `{sampler}` draw alike on all ranks, by a generator that is seeded with the epoch, and deal out what it "
        "draws: list(sampler)[rank : len(sampler) // world_size * world_size : world_size]."
    )


DEAL_OUT = (
    "Deal the items out by rank and by worker in __iter__: with info = get_worker_info() a worker takes item "
    "rank * info.num_workers + info.id of every world_size * info.num_workers."
)
"""The remedy for a stream that is not divided by both."""

KEPT_COPIES = (
    "Leave persistent_workers out, so that the workers of each epoch copy the data set as it then is; or keep what "
    "changes in memory that they share, a tensor made by torch.zeros(1).share_memory_(), and write into that."
)
"""The remedy where workers keep what a data set held in the first epoch."""

# Packages that are known to tell no sampler its epoch.
_READ_LIBRARIES = sys.stdlib_module_names | {"torch", "torchvision", "numpy", "tqdm", "rich", "builtins"}


class ForgottenEpoch(msgspec.Struct, frozen=True, eq=False):
    """A sampler that repeats its order."""

    sampler: Event
    loader: Event
    epochs: LoopAround
    """The loop of epochs."""
    told: Literal["never", "the same", "on some ranks"] = "never"
    """``set_epoch`` is not called, or with the same number every time, or by some ranks and not by the others."""
    anew: bool = False
    """It is made anew in every epoch, of the same data and with the same seed."""
    unread: str = ""
    """The call of code that was not read and may tell it; empty where there is none."""


def forgotten_epochs(projection: Projection) -> Iterator[ForgottenEpoch]:
    """Samplers that shuffle, feed training in several epochs, and whose ``set_epoch`` nothing that was read calls.

    Those that code which was not read gets in every epoch say so in ``unread``.
    """
    told = _samplers_with_epoch(projection)
    if told is None:
        return
    constant_calls = any(event.kind == "set-epoch" and _says_the_same(event) for event in projection.events)
    for feeding in feedings(projection):
        loop = loop_of_epochs(feeding) or projection.machine.cycles.get(feeding.loader.ordinal)
        if loop is None or not feeding.certain:
            continue
        for name, position in (("sampler", 3), ("batch_sampler", 4)):
            value = feeding.loader.argument(name, position) or NONE
            for sampler in samplers_of(projection.machine, value):
                anew = any(around.node is loop.node for around in sampler.loops)
                by = told.get(sampler.ordinal, 0)
                if (by and not feeding.backward.ranks & ~by) or not _shuffles(sampler):
                    continue
                if anew and not _is_repeated(projection, sampler, loop):
                    continue
                unread = _unread_reader(projection, loop, {sampler.ordinal, feeding.loader.ordinal})
                how: Literal["never", "the same", "on some ranks"] = "the same" if constant_calls else "never"
                if sampler.ordinal in told:
                    how = "on some ranks"
                yield ForgottenEpoch(sampler, feeding.loader, loop, how, anew, unread)


def _is_repeated(projection: Projection, sampler: Event, loop: LoopAround) -> bool:
    """Return whether a sampler made in every turn of a loop is of data from before the loop, with one seed."""
    seed = sampler.argument("seed", 4)
    if seed is not None and not isinstance(seed, Const):
        return False
    options = list(options_of(sampler.argument("dataset", 0) or NONE))
    for option in options:
        made = projection.machine.events.get(option.number) if isinstance(option, (Instance, ExternalObject)) else None
        first = option.number if isinstance(option, Instance) else made.ordinal if made is not None else 0
        if not first or (made is not None and any(around.node is loop.node for around in made.loops)):
            return False
        if isinstance(option, Instance) and _is_made_in(projection, option, loop):
            return False
    return bool(options)


def _is_made_in(projection: Projection, instance: Instance, loop: LoopAround) -> bool:
    """Return whether a loop holds the call that makes an object of the project, as far as the code shows it."""
    name = instance.cls.node.name
    calls = (node for node in loop.module.index.within(loop.node, ast.Call))
    return any(last_name(call.func) == name for call in calls)


def _unread_reader(projection: Projection, loop: LoopAround, given: set[int]) -> str:
    """Say which call in every epoch may tell a sampler its number: of code that was not read, with it in hand.

    It gets the sampler or its loader as an argument, or is a method of an object that got one.
    """
    for event in projection.in_course("call"):
        in_epoch = any(around.node is loop.node for around in event.loops)
        if not in_epoch or event.name.partition(".")[0] in _READ_LIBRARIES:
            continue
        handed = [*event.positional, *event.named.values()]
        made = projection.machine.object(event.receiver) if event.receiver is not None else None
        if made is not None and made.name.partition(".")[0] not in _READ_LIBRARIES:
            handed += [*made.positional, *made.named.values()]
        elif "." not in event.name:
            continue  # A method of something known, or of what holds no sampler.
        options = (one for value in handed for one in options_of(value))
        if any(isinstance(one, ExternalObject) and one.number in given for one in options):
            place = f"{event.module.path.name}:{getattr(event.node, 'lineno', 1)}"
            return f"`{event.name}` at {place} gets the sampler in every epoch, and was not read"
    return ""


def _shuffles(sampler: Event) -> bool:
    if not sampler.complete:
        return False
    shuffle = sampler.argument("shuffle", 3)
    return shuffle is None or constant(shuffle) is True


def _samplers_with_epoch(projection: Projection) -> dict[int, int] | None:
    """Return the samplers that get their epoch, by the ranks that tell it; None when a call fits no one sampler."""
    told: dict[int, int] = {}
    walked: set[ast.AST] = set()
    for event in projection.events:
        if event.kind != "set-epoch":
            continue
        walked.add(event.node)
        if event.receiver is None:
            return None
        if _says_the_same(event):
            continue
        for option in options_of(event.receiver):
            receiver = option.receiver if isinstance(option, BoundMethod) else option
            made = projection.machine.object(receiver)
            if isinstance(receiver, Instance):
                made = projection.machine.events.get(receiver.number)
            if isinstance(receiver, (ExternalObject, Instance)) and made is not None:
                inside = (
                    sampler.ordinal
                    for value in (*made.positional, *made.named.values())
                    for sampler in samplers_of(projection.machine, value)
                )
                sure = bool(event.guards) and not any(guard.guessed for guard in event.guards)
                for number in (receiver.number, *inside):
                    told[number] = told.get(number, 0) | (event.ranks if sure else ALL_RANKS)
            elif constant(receiver) is not None and not isinstance(receiver, Instance):
                return None  # What a method of the project does was followed: it may tell a sampler.
    for module in projection.machine.script.modules:
        for node in module.calls_by_name.get("set_epoch", ()) if "set_epoch" in module.text else ():
            if node in walked or not isinstance(node.func, ast.Attribute):
                continue
            if not _is_ruled_out(projection, module, node):
                return None
    return told


def _is_ruled_out(projection: Projection, module: Module, call: ast.Call) -> bool:
    """Return whether a followed function is given no sampler, and only tells the epoch to one that it is given.

    What is merely behind a call that was not followed to its end is not ruled out.
    """
    around = next((one for one in module.ancestors(call) if isinstance(one, ast.FunctionDef)), None)
    test = next((one.test for one in module.ancestors(call) if isinstance(one, ast.If)), None)
    if around is None or test is None or around not in projection.machine.visited:
        return False
    sampler = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    parameters = {one.arg for one in (*around.args.args, *around.args.kwonlyargs)}
    return sampler in parameters and ast.unparse(test) in (sampler, f"{sampler} is not None")


def _says_the_same(event: Event) -> bool:
    """Return whether every turn of a loop tells the same number, as ``set_epoch(0)`` does."""
    number = event.argument("epoch", 0)
    return number is not None and isinstance(number, Const) and any(not loop.once for loop in event.loops)


def loop_of_epochs(feeding: Feeding) -> LoopAround | None:
    """Return the innermost loop around the loop over the loader that makes more than one turn."""
    if feeding.loop is None:
        return None
    position = next(i for i, loop in enumerate(feeding.backward.loops) if loop is feeding.loop)
    outer = [loop for loop in feeding.backward.loops[:position] if not loop.once]
    return outer[-1] if outer else None
