"""One rank saves a sharded model's state, of which it holds a part.

What it finds
    A torch.save under a rank test whose object comes from the state_dict of a model that fully_shard has sharded, or
    from get_model_state_dict without full_state_dict, and that nothing has gathered.

Why it is bad
    The entries are distributed tensors: each rank has its own part of them, and pickling one saves that part. The file
    holds one rank's share of every parameter. The rest is lost, which shows when the checkpoint is needed.

Example
    fully_shard(model)
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "model.pt")

Remedy
    Let every rank write its part with torch.distributed.checkpoint.save; or gather the whole on all ranks with
    get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), and save that on one.

When it is wrong
    In a job of one rank.

References
    https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.interpreter.values import ALL_RANKS, tags_of
from ddpdoctor.source.libraries.sharding import SHARDS
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.ranks.ranks import ranks_text
from ddpdoctor.source.script.script import Script, uses_part

CHECK = Check(
    code="DDP609",
    name="lone-shard-saved",
    severity={"source": Severity.ERROR},
    subjects=("job",),
    triggers=("fully_shard",),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report saves of a rank's own part under a rank test, where nothing is gathered entry by entry."""
    if uses_part(script, ("full_tensor",)):
        return
    for save in whole_projection(script).in_course("save"):
        saved = save.argument("obj", 0)
        guard = next((guard for guard in reversed(save.guards) if guard.arm != ALL_RANKS), None)
        if saved is None or guard is None or not any(kind == SHARDS for kind, _ in tags_of(saved)):
            continue
        yield CHECK.finding(
            "source",
            f"a rank's own part of a sharded model is saved by {ranks_text(save.ranks)} only: the other parts are lost",
            remedy="Save on all ranks with torch.distributed.checkpoint.save; or gather the state on all ranks first, "
            "with get_model_state_dict and StateDictOptions(full_state_dict=True).",
            locations=(save.module.location(save.node), guard.module.location(guard.node)),
            because=((f"`{guard.module.excerpt(guard.node)}` decides", guard.module.location(guard.node)),),
        )
