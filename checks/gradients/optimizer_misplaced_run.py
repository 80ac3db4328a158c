"""Parameters that are trained by name only: they have gradients, and no optimizer holds them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ddpdoctor.diagnosis.divergence.unused_parameters import folded
from ddpdoctor.diagnosis.wording import site_location
from ddpdoctor.finding import Frame, Location
from ddpdoctor.record.model import RunRecord, ShardedModule, Wrap


class Unheld(msgspec.Struct, frozen=True, kw_only=True):
    """What one optimizer leaves out of a model that it was built for."""

    model: str
    """Class of the wrapped module."""
    optimizer_type: str
    names: tuple[str, ...]
    """Folded."""
    count: int
    elements: int
    strangers: int
    """Parameters of the optimizer that are in no wrapped module and have no gradient."""
    steps: int
    ranks: tuple[int, ...]
    """The ranks on which it is so, where it is not so on all."""
    optimizer_location: Location | None
    chain: tuple[Frame, ...]
    """The call chain that built the optimizer, innermost first."""
    wrap_location: Location | None
    sharded: bool = False
    """The model is sharded, which makes new parameters; the location is that of its first forward."""


def unheld_parameters(record: RunRecord) -> Iterator[Unheld]:
    """Yield each wrap and optimizer once, in the words of the first rank."""
    seen: set[tuple[int, Location | None]] = set()
    for entry in sorted(record.unheld_parameters, key=lambda entry: entry.rank):
        place = site_location(record.site(entry.site))
        wrap: Wrap | ShardedModule | None = next(
            (wrap for wrap in record.wraps if (wrap.rank, wrap.wrap) == (entry.rank, entry.wrap)), None
        ) or next((one for one in record.sharded_modules if (one.rank, one.module) == (entry.rank, entry.wrap)), None)
        if wrap is None or (entry.wrap, place) in seen:
            continue
        seen.add((entry.wrap, place))
        ranks = {other.rank for other in record.unheld_parameters if other.wrap == entry.wrap}
        yield Unheld(
            model=wrap.module_class or "the model",
            optimizer_type=entry.optimizer_type,
            names=folded(entry.parameters),
            count=entry.count,
            elements=entry.elements,
            strangers=entry.strangers,
            steps=entry.steps,
            ranks=() if ranks == set(record.rank_numbers()) else tuple(sorted(ranks)),
            optimizer_location=place,
            chain=record.site(entry.site).frames,
            wrap_location=site_location(record.site(wrap.site)),
            sharded=isinstance(wrap, ShardedModule),
        )
