"""Global and local ranks in each other's place."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

import msgspec

from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import (
    RANKS,
    TASK_COUNT,
    Const,
    PerRank,
    SequenceValue,
    Unknown,
    Value,
    constant,
    on_rank,
    tags_of,
)
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.job_kind import keyword, names_another_machine
from ddpdoctor.source.ranks.ranks import GLOBAL_RANK, LOCAL_RANK
from ddpdoctor.source.script.launch_facts import reads_launcher_rank
from ddpdoctor.source.script.syntax_index import last_name, made_from
from ddpdoctor.source.vocabulary import SPAWNERS

_BEYOND_FIRST_NODE = sum(1 << rank for rank in RANKS if GLOBAL_RANK[rank] != LOCAL_RANK[rank])
"""Mask of the ranks whose local rank is another number."""
_NODE_SIZE = "the number of ranks of one node"
_RANKS_TOO = frozenset({("world-size", 0)})
_NODE_SIZES = frozenset({"local_world_size", "LOCAL_WORLD_SIZE", "nproc_per_node", "ngpus_per_node", "n_gpus_per_node"})
"""Names of the number of ranks that a node has."""
_LISTS: Mapping[str, tuple[str, int]] = {"all_gather": ("tensor_list", 0), "gather": ("gather_list", 1)}
"""Collectives that fill a list with a tensor of each rank, and the argument that it is."""


class RankMixUp(msgspec.Struct, frozen=True, eq=False):
    """A rank of the wrong kind given to something."""

    event: Event
    given: str
    """What was given: ``the global rank``."""
    meant: str
    """What belongs there: ``the local rank``."""
    use: str
    """What it is given as: ``a GPU index``."""
    holds: str = "right on one node, wrong on two"
    numbers: str = "on two nodes with two ranks each the local ranks are 0, 1, 0, 1, the global ranks 0, 1, 2, 3"
    """What shows that it is wrong."""
    is_certain: bool = True
    """There is no launch with which it is right."""


def rank_mix_ups(projection: Projection) -> Iterator[RankMixUp]:
    """Devices chosen by the global rank, and process groups joined with local numbers.

    Only ranks whose origin was read count: a parameter that is merely called ``rank`` may hold a local rank, but not
    where the same function chooses another of its devices by a ``local_rank``. A script that spawns its ranks has them
    on one node, where both are the same.
    """
    if projection.machine.spawns:
        yield from _tasks_for_ranks(projection)
        return
    knowing = {
        (event.module, event.function)
        for event in projection.of_kind("device")
        if _lanes_of_device(event.positional[0]) == LOCAL_RANK
    }
    for event in projection.of_kind("device"):
        if not event.ranks & _BEYOND_FIRST_NODE:
            continue  # Their global ranks are their local ones.
        by_name = isinstance(event.positional[0], PerRank) and event.positional[0].guessed
        if by_name and (event.module, event.function) not in knowing:
            continue
        text = ast.unparse(event.node)
        if _lanes_of_device(event.positional[0]) == GLOBAL_RANK and "%" not in text:  # No remainder by a node's GPUs.
            yield RankMixUp(event, "the global rank", "the local rank", "a GPU index")
    # An option ``--local_rank`` may be given by hand, and count the processes of all nodes whatever it is called.
    from_launcher = any(reads_launcher_rank(module) for module in projection.machine.script.modules)
    for event in projection.of_kind("collective"):
        if event.name in _LISTS and "group" not in event.named and _fills_for_one_node(projection, event):
            yield RankMixUp(event, _NODE_SIZE, "the world size", f"the length of the list that {event.name} fills")
        if event.name != "init_process_group":
            continue
        if _constants(event.named.get("rank")) == LOCAL_RANK:
            if _is_spawned(projection, event):
                continue  # The number of a process that the script itself has started, as it does for one node.
            if not from_launcher and names_another_machine(projection):
                continue  # Started by hand on each machine, so the option counts the processes of all of them.
            yield RankMixUp(
                event, "the local rank", "the global rank", "the rank in the process group", is_certain=from_launcher
            )
        elif ("local-world-size", 0) in tags_of(event.named.get("world_size", PerRank(()))):
            yield RankMixUp(event, _NODE_SIZE, "the world size", "the size of the process group")


def _is_spawned(projection: Projection, event: Event) -> bool:
    """Return whether the chain of calls to an event goes through the start of ranks by the script."""
    starts = [one for one in projection.events if one.kind == "call" and one.name in SPAWNERS]
    places = {(str(one.module.path), one.module.location(one.node).line) for one in starts}
    return any((frame.file, frame.line) in places for frame in event.chain)


def _tasks_for_ranks(projection: Projection) -> Iterator[RankMixUp]:
    """Groups as large as there are tasks that each spawn ranks; not where one process spawns one for each task."""
    calls = [event for event in projection.events if event.kind == "call" and event.name in SPAWNERS]
    spawned = [event.argument("nprocs", 2) for event in calls]
    if not spawned or any(value is None or value == Const(1) or TASK_COUNT in tags_of(value) for value in spawned):
        return
    for event in projection.of_kind("collective"):
        size = event.argument("world_size", 3) if event.name == "init_process_group" else None
        if isinstance(size, Unknown) and size.tags - _RANKS_TOO == {TASK_COUNT}:
            yield RankMixUp(
                event,
                "the number of tasks",
                "their number times that of the ranks that each spawns",
                "the size of the process group",
                "right where each task spawns one rank, wrong with more",
                "two tasks that spawn two ranks each make ranks 0, 1, 2, 3 of a group of two",
                all(isinstance(value, Const) for value in spawned),
            )


def _fills_for_one_node(projection: Projection, event: Event) -> bool:
    """Return whether a list of tensors is as long as a node has GPUs or ranks: ``for _ in range(device_count())``."""
    node = event.node
    if not isinstance(node, ast.Call):
        return False
    name, position = _LISTS[event.name]
    filled = keyword(node, name) or (node.args[position] if position < len(node.args) else None)
    if filled is None:
        return False
    ranges = (one for one in made_from(filled, event.module.body_around(node)) if isinstance(one, ast.Call))
    ends = (one.args[0] for one in ranges if last_name(one.func) == "range" and len(one.args) == 1)
    counts = projection.machine.store.device_counts
    return any(
        last_name(end) in _NODE_SIZES
        or last_name(end) in counts
        or (isinstance(end, ast.Call) and event.module.resolve(end.func) == "torch.cuda.device_count")
        for end in ends
    )


def _lanes_of_device(value: Value) -> tuple[object, ...] | None:
    if isinstance(value, PerRank):
        if all(isinstance(entry, SequenceValue) and len(entry.values) == 1 for entry in value.values):
            return tuple(constant(entry.values[0]) for entry in value.values if isinstance(entry, SequenceValue))
        numbers = tuple(_index(constant(on_rank(value, rank))) for rank in RANKS)
        return None if None in numbers else numbers
    return None


def _index(device: object) -> int | None:
    """Return the GPU index of a device given as a number or as ``cuda:N``."""
    if isinstance(device, bool):
        return None
    if isinstance(device, int):
        return device
    if isinstance(device, str) and device.startswith("cuda:") and device[5:].isdigit():
        return int(device[5:])
    return None


def _constants(value: Value | None) -> tuple[object, ...] | None:
    if not isinstance(value, PerRank):
        return None
    return tuple(constant(entry) for entry in value.values)
