"""Gradients of a model in FullyShardedDataParallel are clipped by the norm of each rank's own shards.

What it finds
    A call of torch.nn.utils.clip_grad_norm_ with the parameters of a model that FullyShardedDataParallel wraps.

Why it is bad
    The wrapper leaves each rank the shards of the gradients that it steps. The function sees nothing of the others:
    every rank clips by another norm, each too small, so that the gradient of the whole model changes its direction.

Example
    model = FSDP(model)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

Remedy
    model.clip_grad_norm_(1.0), on all ranks: it reduces the norm over the ranks. With fully_shard torch's own function
    does so by itself.

When it is wrong
    If every wrapper has ShardingStrategy.NO_SHARD; scripts that name it are left out.

References
    https://docs.pytorch.org/docs/stable/fsdp.html#torch.distributed.fsdp.FullyShardedDataParallel.clip_grad_norm_
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check
from ddpdoctor.finding import Fact, Finding, Severity
from ddpdoctor.source.libraries.sharding import CLIPPED
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.queries.wrapped_models import training_events
from ddpdoctor.source.script.code_words import uses_part
from ddpdoctor.source.script.script import Script

CHECK = Check(
    code="DDP225",
    name="local-gradient-norm",
    severity={"source": Severity.ERROR},
    subjects=("training",),
    triggers=("clip_grad_norm",),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report such calls, each once."""
    projection = whole_projection(script)
    for event in () if uses_part(script, ("NO_SHARD",)) else training_events(projection, CLIPPED):
        made = projection.machine.object(event.receiver) if event.receiver is not None else None
        yield CHECK.finding(
            "source",
            "every rank clips by the norm of its own shards: FullyShardedDataParallel leaves it no other gradients",
            remedy="Call clip_grad_norm_ of the wrapped model instead, on all ranks.",
            locations=(event.module.location(event.node),),
            evidence=(Fact(text="the model is wrapped here", basis="source", location=made.module.location(made.node)),)
            if made is not None
            else (),
        )
