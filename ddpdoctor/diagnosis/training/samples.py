"""Whether the data behind equal indices are the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ddpdoctor.record.streams.data import Loader, SampleProbe

Comparison = Literal["same", "different", "meaningless", "unknown"]


def compare_samples(loaders: Sequence[Loader]) -> Comparison:
    """Compare the samples that were fetched by index, under the same seed, on every rank.

    Only informative leaves count: those that differ between the probed indices although the seed is the same, so that
    augmentation at random does no harm and batches made of random numbers alone prove nothing. ``meaningless``: the
    index does not determine the data. ``unknown``: nothing comparable was fetched.
    """
    probes = [{probe.index: probe for probe in loader.samples} for loader in loaders]
    common = sorted(set.intersection(*(set(found) for found in probes))) if probes else []
    if len(common) < 2:
        return "unknown"
    widths = {len(found[index].leaves) for found in probes for index in common}
    if len(widths) != 1:
        return "unknown"
    informative = [_informative([found[index] for index in common], max(widths)) for found in probes]
    leaves = set.intersection(*informative)
    if not leaves:
        return "different" if any(informative) else "meaningless"
    agreements = {all(len({found[index].leaves[leaf] for found in probes}) == 1 for index in common) for leaf in leaves}
    if agreements == {True}:
        return "same"
    return "different" if agreements == {False} else "unknown"


def _informative(probes: Sequence[SampleProbe], width: int) -> set[int]:
    return {leaf for leaf in range(width) if len({probe.leaves[leaf] for probe in probes}) > 1}
