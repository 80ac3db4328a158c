"""Models that a GPU with tensor cores multiplies in full float32."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ddpdoctor.diagnosis.wording import site_location
from ddpdoctor.finding import Location
from ddpdoctor.record.model import RunRecord

MOST_WEIGHTS = 0.5
"""Share of a model's weights that has to be multiplied in full precision."""
FEWEST_WEIGHTS = 1_000_000
"""Smaller models are not kept by their multiplications."""


class FullPrecision(msgspec.Struct, frozen=True, kw_only=True):
    """One model, as its ranks multiply it."""

    module: str
    """Class of the wrapped model."""
    ranks: tuple[int, ...]
    weights: int
    """Elements of the weights that linear and convolution layers multiplied, of the rank with the fewest in full …"""
    full_weights: int
    """… and those among them that were multiplied in full float32."""
    location: Location | None
    """The line that wraps the model."""


def full_precision_models(record: RunRecord) -> Iterator[FullPrecision]:
    """Yield the models that every rank that was looked at multiplies mostly in full precision."""
    wraps = {(wrap.rank, wrap.wrap): wrap for wrap in record.wraps}
    for number in sorted({seen.wrap for seen in record.matmul_precisions}):
        seen = [one for one in record.matmul_precisions if one.wrap == number and (one.rank, number) in wraps]
        if not seen:
            continue
        least = min(seen, key=lambda one: one.full_weights)
        if least.full_weights < max(FEWEST_WEIGHTS, MOST_WEIGHTS * least.weights):
            continue
        wrap = wraps[least.rank, number]
        yield FullPrecision(
            module=wrap.module_class or "the model",
            ranks=tuple(sorted({one.rank for one in seen})),
            weights=least.weights,
            full_weights=least.full_weights,
            location=site_location(record.site(wrap.site)),
        )
