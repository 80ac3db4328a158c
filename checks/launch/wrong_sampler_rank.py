"""A DistributedSampler is given a rank or a number of ranks that the job does not have.

What it finds
    DistributedSampler(rank=..., num_replicas=...) given the local rank, the constant 0, the number of GPUs of one node
    or a fixed number, in a job whose ranks come from a launcher; or a seed= that depends on the rank. The script is
    read as a job of two nodes. In a run: samplers for all ranks, several of which were given the same rank; and shards
    that overlap by more than their padding, as each rank shuffles by another seed, epoch or generator.

Why it is bad
    The sampler gives each process the shard of the rank that it is given. With the local rank the two nodes draw the
    same shards, with rank 0 all processes draw the same one: the rest of the data is never seen, and the loss looks
    fine. A number of replicas that is too small is rejected by the sampler on the higher ranks only, and the others
    wait.

Example
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=local_rank)

Remedy
    Omit both arguments: the sampler gets them from the process group. Or give dist.get_rank() and
    dist.get_world_size().

When it is wrong
    Where each node holds its own part of the data on its own disk; give the local rank and the local world size then.

References
    https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.check import Check, RunRecord, Script, Verdict
from ddpdoctor.finding import Finding, Refuted, Severity, grouped
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import ALL_RANKS, Const, PerRank, Value, constant, is_varying, tags_of
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.job_kind import initialisations, is_single_node, may_spawn
from ddpdoctor.source.ranks.ranks import LOCAL_RANK
from ddpdoctor.source.script.module import argument_of, descend, functions_named, last_name, made_from
from ddpdoctor.source.script.script import uses_any
from ddpdoctor.source.vocabulary import DISTRIBUTED_SAMPLER

CHECK = Check(
    code="DDP517",
    name="wrong-sampler-rank",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ERROR),
    needs=frozenset({"loaders", "passes"}),
    subjects=("sampler",),
    triggers=("DistributedSampler", "LOCAL_RANK", "local_rank"),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report samplers whose shards do not belong to the ranks that draw them."""
    yield from CHECK.suspected(wrong_sampler_ranks(whole_projection(script)))
    yield from CHECK.suspected(divided_by_local_rank(whole_projection(script)))


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report samplers that leave the shards of some ranks to no one, and shards that overlap."""
    from ddpdoctor.checks.data.sharding_run import overlapping_shards
    from ddpdoctor.checks.data.sharding_run import wrong_sampler_ranks as wrong_ranks_in_run

    yield from CHECK.judged(record.job.kind, overlapping_shards(record))
    remedy = (
        "Omit rank= and num_replicas=: the sampler gets them from the process group. Or give dist.get_rank() and "
        "dist.get_world_size()."
    )
    yield from CHECK.judged(record.job.kind, (verdict for _, verdict in wrong_ranks_in_run(record)), remedy)


# Right on one node, where there is a rank for each GPU, and wrong on two.
_ON_TWO_NODES = (
    "on two nodes the local ranks are 0, 1, 0, 1: both nodes draw the same shards, the others are never used"
)
_ONE_NODE = frozenset({("device-count", 0), ("local-world-size", 0)})


def _given(
    sampler: Event, given: str, effect: str, remedy: str, severity: Severity | None = None, *, wrong: bool = True
) -> Verdict:
    return Verdict(
        wrong=wrong,
        sentence=f"the sampler is given {given}",
        remedy=remedy,
        locations=sampler.location,
        because=(effect, sampler),
        severity=severity,
    )


def wrong_sampler_ranks(projection: Projection) -> Iterator[Verdict]:
    """Samplers with a rank or a number of replicas that cannot be right for every rank of the job."""
    samplers = (one for one in projection.events if one.kind == "sampler" and one.name == DISTRIBUTED_SAMPLER)
    made = grouped(samplers, lambda event: event.node)
    seen: set[ast.AST] = set()
    for sampler in projection.in_course("sampler"):
        if sampler.node in seen or sampler.node not in made:
            continue
        seen.add(sampler.node)
        if any(not event.complete or event.ranks != ALL_RANKS or event.guards for event in made[sampler.node]):
            continue
        found = [_judge(projection, event) for event in made[sampler.node]]
        if found[0] is not None and found[0].wrong and all(found):
            yield found[0]


def divided_by_local_rank(projection: Projection) -> Iterator[Verdict]:
    """Data in as many parts as the job has ranks, of which each rank takes the one of its number on its node."""
    seen: set[ast.AST] = set()
    for event in [] if may_spawn(projection.machine.script) else projection.in_course("division"):
        rank, count = event.named["rank"], event.named["num_replicas"]
        of_all = any(kind == "world-size" for kind, _ in tags_of(count))
        if event.node in seen or event.guards or not of_all or not _is_local_rank(projection, rank):
            continue
        seen.add(event.node)
        yield Verdict(
            sentence="the data are divided among all ranks, and each takes the part of its rank on its node",
            remedy="Divide them by the global rank, dist.get_rank().",
            locations=event.location,
            because=(_ON_TWO_NODES.replace("shards", "parts"), event),
            severity=Severity.ADVICE if is_single_node(projection) else None,
        )


def _judge(projection: Projection, sampler: Event) -> Verdict | None:
    replicas, rank = sampler.argument("num_replicas", 1), sampler.argument("rank", 2)
    one_node = replicas is not None and any(tags_of(replicas) == {tag} for tag in _ONE_NODE)
    if constant(replicas or Const(None)) == 1:
        early = any(one.ordinal > sampler.ordinal for one in initialisations(projection))
        return _asked_too_early(sampler) if early and _is_asked(projection, sampler) else None
    if rank is not None and constant(rank) == 0 and type(constant(rank)) is int:
        return _given(
            sampler,
            "rank 0 as its rank in every process",
            "every rank draws the samples of rank 0, and the rest of the data set is never used",
            "Omit rank=: the sampler gets it from the process group. Or give it dist.get_rank().",
        )
    seed, shuffle = sampler.argument("seed", 4), sampler.argument("shuffle", 3)
    by_clock = seed is not None and is_varying(seed) and any(kind == "clock" for kind, _ in tags_of(seed))
    if (by_clock or isinstance(seed, PerRank)) and (shuffle is None or constant(shuffle) is True):
        return _given(
            sampler,
            "a seed that each rank takes from its own clock" if by_clock else "a seed that differs between ranks",
            "each rank draws its part of an order of its own: the parts overlap, and some samples are in none",
            "Give every rank the same seed, or omit seed=: the sampler takes the rank into account itself.",
            Severity.WARNING if by_clock else None,  # Clocks may agree by luck.
        )
    if may_spawn(projection.machine.script):
        return None
    on_two_nodes = Severity.ADVICE if is_single_node(projection) else None
    if rank is not None and _is_local_rank(projection, rank) and one_node:
        return _given(
            sampler,
            "the rank on its node and the number of GPUs or ranks of one node",
            "on two nodes both draw the whole data set: every sample is used twice an epoch",
            "Omit rank= and num_replicas=: the sampler gets them from the process group.",
            Severity.WARNING,  # Nothing is left out.
            wrong=not is_single_node(projection),
        )
    if rank is not None and _is_local_rank(projection, rank):
        return _given(
            sampler,
            "the local rank as its rank",
            _ON_TWO_NODES,
            "Give it the global rank (dist.get_rank()), or omit rank=.",
            on_two_nodes,
        )
    if one_node:
        return _given(
            sampler,
            "the number of GPUs or ranks of one node as its number of replicas",
            "on two nodes there are more ranks than shards, and the sampler rejects the higher ranks",
            "Give it dist.get_world_size(), or omit num_replicas=.",
            on_two_nodes,
        )
    fixed = constant(replicas) if replicas is not None else None
    if type(fixed) is int and not _joins_with(projection, fixed):
        return _given(
            sampler,
            f"a fixed number of {fixed} replicas",
            f"launched with another number of ranks than {fixed}, part of the data is never used or ranks are rejected",
            "Give it dist.get_world_size(), or omit num_replicas=.",
        )
    return None


def _is_asked(projection: Projection, sampler: Event) -> bool:
    """Return whether the number of replicas is what a function says that knows whether there is a process group."""
    given = argument_of(sampler.node, "num_replicas", 1)
    parts = made_from(given, sampler.module.body_around(sampler.node)) if given is not None else ()
    called = {last_name(part.func) for part in parts if isinstance(part, ast.Call)}
    modules = projection.machine.script.modules
    functions = (node for name in called for _, node in functions_named(modules, name))
    calls = (node for function in functions for node in descend(function) if isinstance(node, ast.Call))
    return projection.machine.group_is_made_here and any(last_name(call.func) == "is_initialized" for call in calls)


def _asked_too_early(sampler: Event) -> Verdict:
    return _given(
        sampler,
        "one replica, for there is no process group yet",
        "every rank draws the whole data set",
        "Make the process group first; then omit rank= and num_replicas=.",
    )


def _is_local_rank(projection: Projection, rank: Value) -> bool:
    if not isinstance(rank, PerRank) or tuple(constant(entry) for entry in rank.values) != LOCAL_RANK:
        return False
    return not rank.guessed or uses_any(projection.machine.script, ("--local_rank", "--local-rank"))


def _joins_with(projection: Projection, size: int) -> bool:
    """Return whether the script itself fixes the size of its process group to the same number, or joins none."""
    found = list(initialisations(projection))
    return not found or any(constant(event.argument("world_size") or Const(None)) == size for event in found)
