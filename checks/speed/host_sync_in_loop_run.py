"""Lines that read a result back from the GPU in every step, as a live run has sampled them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ddpdoctor.diagnosis.performance.summarise import summarise
from ddpdoctor.diagnosis.wording import site_location
from ddpdoctor.finding import Location
from ddpdoctor.record.model import RunRecord

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
