"""BatchNorm in DDP models whose batch on each rank is small."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import Const, ExternalObject, constant
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.training_loops import feedings
from ddpdoctor.source.queries.wrapped_models import wrap_numbers
from ddpdoctor.source.script.code_words import uses_part
from ddpdoctor.source.torch_model.buffers import parts_of_module

SMALL_BATCH = 16
"""Samples a rank below which the statistics of a batch are known to hurt (Wu and He, Group Normalization, 2018)."""
_BATCH_NORM = re.compile(r"torch\.nn\.BatchNorm\dd$")


class SmallBatchNorm(msgspec.Struct, frozen=True, eq=False):
    """A wrap of a model with BatchNorm layers that sees few samples a rank."""

    wrap: Event
    loader: Event
    layers: int
    batch_size: int
    """Samples a rank and forward."""


def small_batch_norms(projection: Projection) -> Iterator[SmallBatchNorm]:
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
            layers = sum(
                isinstance(part, ExternalObject) and _BATCH_NORM.match(part.name) is not None
                for part in parts_of_module(machine, module)
            )
            if layers:
                seen.add(number)
                yield SmallBatchNorm(wrap, feeding.loader, layers, size)
