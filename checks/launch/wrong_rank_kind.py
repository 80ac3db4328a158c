"""A global rank is used where a local one belongs, or the reverse.

What it finds
    The global rank used as a GPU index; init_process_group given the local rank, the number of ranks of one node, or
    the number of cluster tasks that each spawn several ranks; a seed that the local rank alone sets apart, as advice
    where a loader divides the data; and a test of the local rank that decides which rank saves for the whole job. The
    script is read as a job of two nodes, and `--layout 2x1` rehearses it as one.

Why it is bad
    On one node both numbers are the same, so everything works until the first job on two nodes. There a global rank
    requests GPUs that the node does not have, a local rank makes two processes claim the same rank in the group, and
    the first rank of every node writes the checkpoint at the same time.

Example
    torch.cuda.set_device(dist.get_rank())
    if local_rank == 0:
        torch.save(model.state_dict(), "checkpoint.pt")

Remedy
    Choose GPUs by LOCAL_RANK; decide what is done once per job by RANK, as returned by dist.get_rank().

When it is wrong
    For a save: if every node should keep its own copy on its own disk.

References
    https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

import msgspec

from ddpdoctor.check import Check, Script
from ddpdoctor.checks.data.unseeded_random_split import Library, seeds_of
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import (
    RANKS,
    TASK_COUNT,
    Const,
    PerRank,
    Unknown,
    Value,
    constant,
    tags_of,
)
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.files import saves_by_guard
from ddpdoctor.source.queries.job_kind import gpus_of, is_single_node, names_another_machine
from ddpdoctor.source.ranks.ranks import GLOBAL_RANK, LOCAL_RANK
from ddpdoctor.source.script.launch_facts import reads_launcher_rank
from ddpdoctor.source.script.module import argument_of, last_name, made_from
from ddpdoctor.source.vocabulary import SPAWNERS

CHECK = Check(
    code="DDP501",
    name="wrong-rank-kind",
    stands_for="wrong-rank-kind",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ERROR),
    needs=frozenset({"ranks"}),
    nodes=2,
    subjects=("job",),
    triggers=("rank", "RANK", "SLURM_", "local_process_index", "is_local_main_process"),
)
MAXIMUM_PLACES = 5


def in_source(script: Script) -> Iterator[Finding]:
    """Report one finding for each kind of mix-up, with the places where it occurs; advice where no two nodes can be."""
    projection = whole_projection(script)
    milder = Severity.ADVICE if is_single_node(projection) else None
    kinds: dict[str, list[RankMixUp]] = {}
    for mix_up in rank_mix_ups(projection):
        kinds.setdefault(mix_up.use, []).append(mix_up)
    for mix_ups in kinds.values():
        first = mix_ups[0]
        yield CHECK.finding(
            f"{first.given} is used as {first.use}: {first.holds}",
            remedy=f"Use {first.meant} here"
            + (' (int(os.environ["LOCAL_RANK"]) under torchrun).' if first.meant == "the local rank" else "."),
            locations=tuple({one.event.location: 0 for one in mix_ups})[:MAXIMUM_PLACES],
            because=(first.numbers, first.event),
            severity=Severity.ADVICE if first.is_slight else milder if first.is_certain else milder or Severity.WARNING,
        )
    for saves in saves_by_guard(projection):
        written = tuple(save.event.location for save in saves)
        guard, more = saves[0].guard, f" and {len(saves) - 1} more" if len(saves) > 1 else ""
        yield CHECK.finding(
            f"the local rank decides which rank saves {saves[0].path}{more}: on two nodes the first rank of each "
            "writes it",
            remedy="Decide by the global rank: `if dist.get_rank() == 0:`.",
            locations=(guard.location, *written) if guard is not None else written,
            ranks=(0, 2),
            because=("this call writes the file", written[0]),
            severity=milder or Severity.WARNING,
        )


in_run = CHECK.judged_by("diagnosis.failures", "wrong_index")


_BEYOND_FIRST_NODE = sum(1 << rank for rank in RANKS if GLOBAL_RANK[rank] != LOCAL_RANK[rank])
"""Mask of the ranks whose local rank is another number."""
_NODE_SIZE = "the number of ranks of one node"
_RANKS_TOO = frozenset({("world-size", 0)})
# Names of the number of ranks that a node has.
_NODE_SIZES = frozenset({"local_world_size", "LOCAL_WORLD_SIZE", "nproc_per_node", "ngpus_per_node", "n_gpus_per_node"})
# Collectives that fill a list with a tensor of each rank, and the argument that it is.
_LISTS: Mapping[str, tuple[str, int]] = {"all_gather": ("tensor_list", 0), "gather": ("gather_list", 1)}


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
    is_slight: bool = False
    """Little depends on it."""


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
        if gpus_of(event.positional[0]) == LOCAL_RANK
    }
    for event in projection.of_kind("device"):
        if not event.ranks & _BEYOND_FIRST_NODE:
            continue  # Their global ranks are their local ones.
        by_name = isinstance(event.positional[0], PerRank) and event.positional[0].guessed
        if by_name and (event.module, event.function) not in knowing:
            continue
        text = ast.unparse(event.node)
        if gpus_of(event.positional[0]) == GLOBAL_RANK and "%" not in text:  # No remainder by a node's GPUs.
            yield RankMixUp(event, "the global rank", "the local rank", "a GPU index")
    yield from _seeds_by_local_rank(projection)
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


def _seeds_by_local_rank(projection: Projection) -> Iterator[RankMixUp]:
    """Seeds that differ within a node and come again on every other one, the last of their library.

    Where a loader divides the data only what is drawn besides repeats, which is advice.
    """
    seen = set[ast.AST]()
    libraries: tuple[Library, ...] = ("torch", "numpy", "random")
    for seed in (seeds[-1] for library in libraries if (seeds := seeds_of(projection, library))):
        value = next(iter((*seed.positional, *seed.named.values())), None)
        lanes = _constants(value)
        half = len(RANKS) // 2
        repeats = lanes is not None and lanes[:half] == lanes[half:] and len(set(lanes)) > 1
        kinds = {kind for kind, _ in tags_of(value)} if isinstance(value, Unknown) else set[str]()
        if (
            seed.node in seen
            or _names_a_node(seed)
            or not (repeats or ("rank-of-node" in kinds and "rank-of-job" not in kinds))
        ):
            continue
        seen.add(seed.node)
        yield RankMixUp(
            seed,
            "the local rank",
            "the global rank",
            "what sets the seeds of the ranks apart",
            "on two nodes each seed is used twice",
            is_certain=False,
            is_slight=any(projection.of_kind("loader")),
        )


def _names_a_node(seed: Event) -> bool:
    """Return whether a seed is made of what a machine's number may be called, which the launch gives."""
    made = made_from(seed.node, seed.module.body_around(seed.node))
    return any("node" in (last_name(one) or "").lower() for one in made if isinstance(one, (ast.Name, ast.Attribute)))


def _is_spawned(projection: Projection, event: Event) -> bool:
    """Return whether the chain of calls to an event goes through the start of ranks by the script."""
    starts = [one for one in projection.events if one.kind == "call" and one.name in SPAWNERS]
    places = {(str(one.module.path), one.location.line) for one in starts}
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
    filled = argument_of(node, name, position)
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


def _constants(value: Value | None) -> tuple[object, ...] | None:
    if not isinstance(value, PerRank):
        return None
    return tuple(constant(entry) for entry in value.values)
