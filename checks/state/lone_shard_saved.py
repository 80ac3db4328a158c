"""One rank saves what each rank has a part of, or has for itself.

What it finds
    A torch.save under a rank test whose object comes from the state_dict of a model that fully_shard has sharded, or
    from get_model_state_dict without full_state_dict, and that nothing has gathered; and the state_dict of an optimizer
    over such a model, or over one that FullyShardedDataParallel has sharded, be it saved by one rank or by all under
    one path. Also a file with the number of
    the rank in its name, which ranks read that never write theirs.

Why it is bad
    The entries are distributed tensors: each rank has its own part of them, and pickling one saves that part. The file
    holds one rank's share of every parameter, or of its moments, which every rank then loads as its own. The rest is
    lost, which shows when the checkpoint is needed. A rank that has written no file of its own does not find it, goes
    on without, or reads that of an earlier run.

Example
    fully_shard(model)
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "model.pt")

Remedy
    Let every rank write its part with torch.distributed.checkpoint.save; or gather the whole on all ranks with
    get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), and save that on one. For an optimizer,
    get_optimizer_state_dict does it, or FSDP.optim_state_dict of the older wrapper.

When it is wrong
    In a job of one rank.

References
    https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check, Script
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.interpreter.values import ALL_RANKS, tags_of
from ddpdoctor.source.libraries.sharding import SHARDS
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.queries.divergence import guard_of
from ddpdoctor.source.queries.files import shared_saves
from ddpdoctor.source.ranks.ranks import ranks_text
from ddpdoctor.source.script.script import uses_part

CHECK = Check(
    code="DDP609",
    name="lone-shard-saved",
    severity={"source": Severity.ERROR},
    subjects=("job",),
    triggers=("fully_shard", "FullyShardedDataParallel", "rank", "RANK", "process_index"),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report saves of a rank's own part under a rank test, where nothing is gathered entry by entry; and files of each
    rank that some ranks read without writing theirs.
    """
    yield from _of_own_files(script)
    if uses_part(script, ("full_tensor",)):
        return
    projection = whole_projection(script)
    for save in projection.in_course("save"):
        saved = save.argument("obj", 0)
        parts = {number for kind, number in tags_of(saved) if kind == SHARDS} if saved is not None else set()
        guard = next((guard for guard in reversed(save.guards) if guard.arm != ALL_RANKS), None)
        guard = guard or (guard_of(projection, save) if save.ranks not in (0, ALL_RANKS) else None)
        by_all = (save.node is shared.event.node for shared in shared_saves(projection) if 0 not in parts)
        if not parts or (guard is None and not any(by_all)):
            continue
        lost = f"saved by {ranks_text(save.ranks)} only: the other parts are lost"
        if guard is None:
            lost = "saved by every rank under one path: one part is left, and the others are lost"
        decides = () if guard is None else ((f"`{guard.module.excerpt(guard.node)}` decides", guard.location),)
        yield CHECK.finding(
            f"a rank's own part of {'a sharded model' if 0 in parts else _OF_OPTIMIZER} is {lost}",
            remedy=_REMEDIES[0 not in parts],
            locations=(save.location, *(place for _, place in decides)),
            because=decides or (("there is no rank test around this call or its callers", save),),
        )


_OF_OPTIMIZER = "the optimizer's state of a sharded model"
_REMEDIES = (  # For the weights, and for the state of an optimizer.
    "Save on all ranks with torch.distributed.checkpoint.save; or gather the state on all ranks first, with "
    "get_model_state_dict and StateDictOptions(full_state_dict=True).",
    "Gather the state on all ranks first, with get_optimizer_state_dict and StateDictOptions(full_state_dict=True), "
    "and load it with set_optimizer_state_dict; or let every rank save and load a file of its own.",
)


def _of_own_files(script: Script) -> Iterator[Finding]:
    from ddpdoctor.checks.state.own_files_source import lone_files

    for found in lone_files(whole_projection(script)):
        write, read = found.write.event, found.read.event
        guard = next((one for one in reversed(write.guards) if one.arm != ALL_RANKS), None)
        readers = "every rank reads" if read.ranks == ALL_RANKS else f"{ranks_text(read.ranks)} read"
        yield CHECK.finding(
            f"{readers} a file of its own, `{found.name}`, and only {ranks_text(write.ranks)} "
            f"{'write' if write.ranks & (write.ranks - 1) else 'writes'} one: the others find none, or an old one",
            remedy="Let every rank write its own file, outside of the test of the rank; or let all ranks read that of "
            "rank 0, under a name without their numbers.",
            locations=(None if guard is None else guard.module.location(guard.node), write.location, read.location),
            because=(("it is written here", write), ("it is read here", read)),
            severity=Severity.WARNING,
        )
