"""BatchNorm sees only a small batch on each rank, or evaluates with statistics of the rank's own.

What it finds
    A DDP model with BatchNorm layers whose training loader gives each rank fewer than 16 samples, in a script without
    SyncBatchNorm. Or one that every rank evaluates, wrapped with `broadcast_buffers=False`, where nothing else makes
    the running statistics alike.

Why it is bad
    Every rank normalises by the mean and variance of its own few samples. They are noisy, the running statistics that
    evaluation uses are those of rank 0, and accuracy falls below that of the same global batch on one GPU.

Example
    loader = DataLoader(dataset, batch_size=2, sampler=sampler)
    model = DistributedDataParallel(ResNet())

Remedy
    Convert before the wrap: model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model). Or use GroupNorm.

When it is wrong
    Where the BatchNorm layers are frozen (eval mode), as in fine-tuned detectors. SyncBatchNorm costs two collectives a
    layer and step.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html
    https://arxiv.org/abs/1803.08494
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check, RunRecord, Script, Verdict
from ddpdoctor.files import regex
from ddpdoctor.finding import Finding, Location, Refuted, Severity
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import ALL_RANKS, Const, ExternalObject, Value, constant
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.training_loops import feedings
from ddpdoctor.source.queries.wrapped_models import wrap_numbers
from ddpdoctor.source.script.script import calls_any, uses_part
from ddpdoctor.source.torch_model.buffers import parts_of_module

CHECK = Check(
    code="DDP205",
    name="unsynchronised-batchnorm",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ADVICE),
    needs=frozenset({"wraps", "forwards", "loaders"}),
    subjects=("model", "training-loader"),
    triggers=("BatchNorm",),
)
SMALL_BATCH = 16
"""Samples a rank below which statistics are noisy."""
_REMEDY = "Call SyncBatchNorm.convert_sync_batchnorm(model) before the wrap, or use GroupNorm."


_ALIKE = (
    "Leave broadcast_buffers=True, or broadcast the buffers of rank 0 before the evaluation; with SyncBatchNorm they "
    "are alike as well."
)
_MADE_ALIKE = ("buffers", "named_buffers", "convert_sync_batchnorm")


def in_source(script: Script) -> Iterator[Finding]:
    """Report wraps of BatchNorm models that are fed small batches."""
    yield from CHECK.suspected(small_batch_norms(whole_projection(script)), _REMEDY)
    yield from CHECK.suspected(own_statistics(whole_projection(script)), _ALIKE)


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the BatchNorm layers that train on small batches; refute it where they do not train, or on large ones."""
    from ddpdoctor.checks.gradients.steps_run import fed_batch_norms

    judged = (judge_layers(*fed) for fed in fed_batch_norms(record))
    yield from CHECK.judged(record.job.kind, judged, _REMEDY)


def judge_layers(wrap: Location | None, loader: Location | None, layers: int, samples: int) -> Verdict:
    """Pass a verdict on layers that normalise over so many samples of a rank, and are fed by a loader."""
    if not layers or samples >= SMALL_BATCH:
        reason = f"each rank trains on {samples} samples" if layers else "no BatchNorm layer is trained"
        return Verdict(wrong=False, sentence=reason, locations=wrap)
    what = "1 BatchNorm layer normalises" if layers == 1 else f"{layers} BatchNorm layers normalise"
    text = f"this loader gives each rank {samples} samples at a time"
    return Verdict(
        sentence=f"{what} over {samples} samples a rank",
        locations=wrap,
        because=(text, loader, {"samples_per_rank": samples, "layers": layers}),
    )


"""Samples a rank below which the statistics of a batch are known to hurt (Wu and He, Group Normalization, 2018)."""
_FORWARDS = ("forward", "bare forward")
_BATCH_NORM = regex(r"torch\.nn\.BatchNorm\dd$")


def small_batch_norms(projection: Projection) -> Iterator[Verdict]:
    """Wraps of models with BatchNorm that a loader with a small, constant batch size feeds."""
    machine = projection.machine
    if uses_part(machine.script, ("SyncBatchNorm", "convert_sync", "SyncBN", "syncbn")):
        return
    seen: set[int] = set()
    for feeding in feedings(projection):
        size = constant(feeding.loader.argument("batch_size", 1) or Const(1))
        if not isinstance(size, int) or size >= SMALL_BATCH or "batch_sampler" in feeding.loader.named:
            continue
        for number in sorted(wrap_numbers(feeding.backward.receiver) - seen):
            wrap = machine.events.get(number)
            module = wrap.argument("module", 0) if wrap is not None else None
            if wrap is None or module is None:
                continue
            layers = _layers(machine, module)
            if layers:
                seen.add(number)
                yield judge_layers(wrap.location, feeding.loader.location, layers, size)


def own_statistics(projection: Projection) -> Iterator[Verdict]:
    """Yield models with BatchNorm that every rank evaluates by the running statistics of its own samples."""
    machine = projection.machine
    if calls_any(machine.script, _MADE_ALIKE) or uses_part(machine.script, ("SyncBatchNorm", "running_mean")):
        return
    wraps = list(projection.in_course("wrap"))
    module = wraps[0].argument("module", 0) if len(wraps) == 1 else None
    if module is None or constant(wraps[0].named.get("broadcast_buffers", Const(True))) is not False:
        return
    forwards = (one for one in projection.in_course("ddp-forward", "training") if one.name in _FORWARDS)
    alone = (one for one in forwards if not one.gradients and one.ranks == ALL_RANKS)
    evaluated = next((one for one in alone if one.ordinal > wraps[0].ordinal), None)
    if evaluated is not None and _layers(machine, module):
        yield Verdict(
            sentence="with broadcast_buffers=False the running statistics of BatchNorm are each rank's own: the ranks "
            "evaluate different networks, and a checkpoint holds one of them",
            locations=wraps[0].location,
            because=("every rank evaluates it here", evaluated),
        )


def _layers(machine: Machine, module: Value) -> int:
    """Return how many layers of BatchNorm a model certainly has."""
    parts = parts_of_module(machine, module)
    return sum(isinstance(part, ExternalObject) and _BATCH_NORM.match(part.name) is not None for part in parts)
