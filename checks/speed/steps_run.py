"""What the steps of a live run wait for: batches, results that are read back, and slow links."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import msgspec

from ddpdoctor.diagnosis.performance.stragglers import enough_steps, holds, typical
from ddpdoctor.diagnosis.performance.summarise import summarise
from ddpdoctor.diagnosis.performance.summary import RunSummary, Traffic, threshold
from ddpdoctor.diagnosis.performance.traffic import link_of
from ddpdoctor.diagnosis.sync_points import GRADIENTS
from ddpdoctor.diagnosis.training.pass_lengths import training_loader
from ddpdoctor.diagnosis.wording import site_location
from ddpdoctor.finding import Location
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.training import Loader

NEARLY_ALL = 0.8
"""Share of the waiting in the first batches of passes from which on the workers keep up with the others."""


class DataWait(msgspec.Struct, frozen=True, kw_only=True):
    """How long the steps of a run wait for data."""

    share: float
    """Of the step, of the rank in the middle, in the quarter of the run in the middle, as are the next two."""
    wait_ns: float
    step_ns: float
    worst_rank: int
    worst_wait_ns: float
    mean_share: float
    """Of all steps together: single long waits show in it."""
    loader: Loader | None
    """The loader that feeds the training, where it is known."""
    first_of_pass_ns: float = 0.0
    """What the first batch of a pass waits, where these make nearly all of the waiting; else 0."""


def data_wait(record: RunRecord) -> DataWait | None:
    """Return the wait for data if it takes more of the step than it may, on half of the ranks or more.

    One rank whose data come late is a straggler and keeps the others waiting elsewhere. Raises TooLittleEvidence where
    too few steps were measured.
    """
    limit = threshold(record, "input-bound")
    if not holds(record, lambda part: _middle(part)[0] > limit):
        return None
    summary = typical(record, lambda part: _middle(part)[0])
    share, wait_ns, step_ns = _middle(summary)
    worst = max(summary.ranks, key=lambda rank: rank.phases.data_wait_ns)
    loader = training_loader(record)
    return DataWait(
        share=share,
        wait_ns=wait_ns,
        step_ns=step_ns,
        worst_rank=worst.rank,
        worst_wait_ns=worst.phases.data_wait_ns,
        mean_share=_middle(enough_steps(record))[0],
        loader=loader,
        first_of_pass_ns=_first_of_pass_ns(record, worst.rank, loader),
    )


def _first_of_pass_ns(record: RunRecord, rank: int, loader: Loader | None) -> float:
    """Return the mean of the long waits of a rank, where they come once a pass and the other batches hardly wait."""
    track = next((track for track in record.step_tracks if track.rank == rank), None)
    if track is None or loader is None or not loader.length or len(track.step) < 2 * loader.length:
        return 0.0
    waits = dict(zip(track.step, track.data_wait_ns, strict=True))
    most = max(1, len(waits) // loader.length)
    longest = sorted(waits, key=lambda step: waits[step], reverse=True)[:most]
    at = {step % loader.length for step in longest}
    held = sum(waits[step] for step in longest)
    return held / most if len(at) == 1 and held > NEARLY_ALL * sum(waits.values()) else 0.0


def _middle(summary: RunSummary) -> tuple[float, float, float]:
    """Share, wait and step of the rank in the middle; of two the one that waits less."""
    waits = sorted(
        (rank.phases.data_wait_ns / rank.phases.step_ns, rank.phases.data_wait_ns, rank.phases.step_ns)
        for rank in summary.ranks
    )
    return waits[(len(waits) - 1) // 2] if waits else (0.0, 0.0, 0.0)


# Lines that read a result back from the GPU in every step, as a live run has sampled them.

EVERY_STEP = 0.9
"""Share of the sampled steps in which a line has to read."""
FEWEST_STEPS = 10
"""Sampled steps that it takes to judge."""
WAIT_SHARE = 0.01
"""Share of the step below which the wait costs nothing worth a word."""
_SPELLED = {"__bool__": "the truth value of a tensor", "__float__": "float(tensor)", "__int__": "int(tensor)"}


class ReadInEveryStep(msgspec.Struct, frozen=True, kw_only=True):
    """One line, on the rank that waits longest in it."""

    name: str
    """The read as users spell it."""
    location: Location
    ranks: tuple[int, ...]
    steps_with: int
    steps: int
    calls_per_step: float
    wait_ns: float
    """Mean per step."""


def sampled_reads(record: RunRecord) -> Iterator[ReadInEveryStep]:
    """Yield the lines that read in nearly every sampled step, in the order of their ranks and numbers."""
    phases = summarise(record).phases
    least_ns = 0.0 if phases is None else WAIT_SHARE * phases.step_ns
    by_line: dict[tuple[Location, str], list[tuple[float, int]]] = {}
    for position, read in enumerate(record.host_reads):
        location = site_location(record.site(read.site))
        wait_ns = read.wait_ns / read.steps if read.steps else 0.0
        often = read.steps >= FEWEST_STEPS and read.steps_with >= EVERY_STEP * read.steps
        if location is not None and often and wait_ns >= least_ns:
            by_line.setdefault((location, read.method), []).append((wait_ns, position))
    for (location, method), found in by_line.items():
        wait_ns, position = max(found)
        read = record.host_reads[position]
        yield ReadInEveryStep(
            name=_SPELLED.get(method, f".{method}()"),
            location=location,
            ranks=tuple(sorted({record.host_reads[position].rank for _, position in found})),
            steps_with=read.steps_with,
            steps=read.steps,
            calls_per_step=read.calls / read.steps,
            wait_ns=wait_ns,
        )


# Process groups whose gradients move far slower than the link between their GPUs should carry them.

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
