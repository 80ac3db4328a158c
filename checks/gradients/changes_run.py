"""Wrapped modules that are no longer what DDP took note of."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ddpdoctor.checks.gradients.ddp_failures_run import wrap_location
from ddpdoctor.diagnosis.divergence.unused_parameters import folded, frozen_names
from ddpdoctor.diagnosis.training.replicas import replicated_wraps
from ddpdoctor.diagnosis.wording import site_location
from ddpdoctor.finding import Location
from ddpdoctor.record.model import RunRecord, Wrap


class Frozen(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters that were frozen after the wrap and that DDP waited for."""

    model: str
    names: tuple[str, ...]
    """Folded."""
    parameters: int
    wrap_location: Location | None
    forward_location: Location | None


class LateBatchNorms(msgspec.Struct, frozen=True, kw_only=True):
    """SyncBatchNorm layers that came into a module after it was wrapped."""

    model: str
    layers: int
    wrap_location: Location | None
    forward_location: Location | None


def frozen_after_wrap(record: RunRecord) -> Iterator[Frozen]:
    """Yield the wraps that waited for nothing for gradients of parameters that were frozen after the wrap."""
    for wraps in replicated_wraps(record):
        first = wraps[min(wraps)]
        frozen = frozen_names(record, first.rank, first.wrap)
        missing: set[str] = set()
        for entry in record.missing_gradients:
            if (entry.rank, entry.wrap) == (first.rank, first.wrap):
                missing.update(entry.parameters)
        served = first.options.get("find_unused_parameters") or first.options.get("static_graph")
        if not served and (names := sorted(frozen & missing)):
            yield Frozen(
                model=first.module_class or "the model",
                names=folded(names),
                parameters=len(names),
                wrap_location=wrap_location(record, wraps),
                forward_location=_forward_place(record, first, "frozen"),
            )


def late_batch_norms(record: RunRecord) -> Iterator[LateBatchNorms]:
    """Yield the wraps whose SyncBatchNorm layers are newer than they."""
    for wraps in replicated_wraps(record):
        first = wraps[min(wraps)]
        for change in record.wrap_changes:
            if (change.rank, change.wrap) == (first.rank, first.wrap) and change.late_batch_norms:
                yield LateBatchNorms(
                    model=first.module_class or "the model",
                    layers=change.late_batch_norms,
                    wrap_location=wrap_location(record, wraps),
                    forward_location=_forward_place(record, first, "late_batch_norms"),
                )
                break


def _forward_place(record: RunRecord, wrap: Wrap, field: str) -> Location | None:
    for change in record.wrap_changes:
        if (change.rank, change.wrap) == (wrap.rank, wrap.wrap) and getattr(change, field):
            return site_location(record.site(change.site))
    return None
