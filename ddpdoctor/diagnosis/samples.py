"""Whether the data behind equal indices are the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from ddpdoctor.record.model import Loader, SampleProbe


def same_samples(loaders: Sequence[Loader]) -> bool | None:
    """Compare the samples that were fetched by index on every rank.

    Only informative leaves count: those that the index determines (equal under both seeds) and that differ between the
    probed indices. Returns True when all of them are equal on all ranks, False when none is, None when it cannot be
    known: nothing probed in common, random samples, constants.
    """
    probes = [{probe.index: probe for probe in loader.samples} for loader in loaders]
    common = sorted(set.intersection(*(set(found) for found in probes))) if probes else []
    informative = [_informative([found[index] for index in common]) for found in probes]
    leaves = set.intersection(*informative) if informative else set()
    if len(common) < 2 or not leaves:
        return None
    agreements = {
        leaf: all(len({found[index].leaves_first_seed[leaf] for found in probes}) == 1 for index in common)
        for leaf in leaves
    }
    if all(agreements.values()):
        return True
    return None if any(agreements.values()) else False


def _informative(probes: Sequence[SampleProbe]) -> set[int]:
    widths = {len(probe.leaves_first_seed) for probe in probes} | {len(probe.leaves_second_seed) for probe in probes}
    if len(widths) != 1:
        return set()
    return {
        leaf
        for leaf in range(widths.pop())
        if all(probe.leaves_first_seed[leaf] == probe.leaves_second_seed[leaf] for probe in probes)
        and len({probe.leaves_first_seed[leaf] for probe in probes}) > 1
    }
