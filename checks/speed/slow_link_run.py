"""Process groups whose gradients move far slower than the link between their GPUs should carry them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import msgspec

from ddpdoctor.diagnosis.performance.stragglers import enough_steps, holds
from ddpdoctor.diagnosis.performance.summary import RunSummary, Traffic, threshold
from ddpdoctor.diagnosis.performance.traffic import link_of
from ddpdoctor.diagnosis.sync_points import GRADIENTS
from ddpdoctor.record.model import RunRecord

LEAST_BYTES = 10_000_000
"""Gradients of a step below this are moved in a time that latency decides."""


class SlowLink(msgspec.Struct, frozen=True, kw_only=True):
    """One group and its link."""

    group: str
    link: str
    """``NVLink`` or ``PCIe``."""
    bandwidth_bytes_per_s: float
    limit_bytes_per_s: float
    share: float
    measured_ns: float
    """Per step."""
    expected_ns: float
    """What a ring over that link takes per step by its standard."""
    bytes_per_step: float


def slow_links(record: RunRecord) -> Iterator[SlowLink]:
    """Yield the groups whose bandwidth on the bus is too small a share of their link's, all along.

    Raises TooLittleEvidence where too few steps were measured.
    """
    limit = threshold(record, "slow-link")
    summary = enough_steps(record)
    links = {link.kind for group in record.groups if (link := link_of(record, group.ranks)) is not None}
    for entry in summary.traffic:
        if entry.kind != GRADIENTS or not _is_slow(entry, limit):
            continue
        if not holds(record, partial(_shows, entry.group, limit)):
            continue
        assert entry.bus_bandwidth_bytes_per_s and entry.limit_bytes_per_s and entry.ns_per_step
        share = entry.bus_bandwidth_bytes_per_s / entry.limit_bytes_per_s
        yield SlowLink(
            group=entry.group,
            link=next(iter(links)) if len(links) == 1 else "link",
            bandwidth_bytes_per_s=entry.bus_bandwidth_bytes_per_s,
            limit_bytes_per_s=entry.limit_bytes_per_s,
            share=share,
            measured_ns=entry.ns_per_step,
            expected_ns=entry.ns_per_step * share,
            bytes_per_step=entry.bytes_per_step,
        )


def _is_slow(entry: Traffic, limit: float) -> bool:
    if entry.bus_bandwidth_bytes_per_s is None or entry.limit_bytes_per_s is None or not entry.ns_per_step:
        return False
    return entry.bytes_per_step >= LEAST_BYTES and entry.bus_bandwidth_bytes_per_s < limit * entry.limit_bytes_per_s


def _shows(group: str, limit: float, summary: RunSummary) -> bool:
    return any(entry.kind == GRADIENTS and entry.group == group and _is_slow(entry, limit) for entry in summary.traffic)
