"""What the steps of a live run wait for: batches, results that are read back, and slow links."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ddpdoctor.check import Reason, Verdict
from ddpdoctor.diagnosis.performance.stragglers import enough_steps, holds, standing, typical
from ddpdoctor.diagnosis.performance.summarise import summarise
from ddpdoctor.diagnosis.performance.summary import RunSummary, Traffic, threshold
from ddpdoctor.diagnosis.performance.traffic import link_of
from ddpdoctor.diagnosis.sync_points import GRADIENTS
from ddpdoctor.diagnosis.training.pass_lengths import training_loader
from ddpdoctor.diagnosis.wording import bytes_text, milliseconds_text, site_location
from ddpdoctor.finding import Location
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.measured import HostRead
from ddpdoctor.record.streams.training import Loader

MUCH_MORE = 1.25
"""Times the typical share from which on the mean of the whole run is worth a word."""
NEARLY_ALL = 0.8
"""Share of the waiting in the first batches of passes from which on the workers keep up with the others."""


def data_wait(record: RunRecord) -> Iterator[Verdict]:
    """Yield the wait for data if it takes more of the step than it may, on half of the ranks or more.

    One rank whose data come late is a straggler and keeps the others waiting elsewhere. Raises TooLittleEvidence where
    too few steps were measured.
    """
    limit = threshold(record, "input-bound")
    if not holds(record, lambda part: _middle(part)[0] > limit):
        return
    summary = typical(record, lambda part: _middle(part)[0])
    share, wait_ns, step_ns = _middle(summary)
    worst = max(summary.ranks, key=lambda rank: rank.phases.data_wait_ns)
    worst_ns, loader = worst.phases.data_wait_ns, training_loader(record)
    first_ns = _first_of_pass_ns(record, worst.rank, loader)
    numbers = {"wait_ns": wait_ns, "worst_wait_ns": worst_ns, "step_ns": step_ns}
    longest = f"rank {worst.rank} waits longest, {milliseconds_text(worst_ns)} a step"
    because: list[Reason] = [(longest, None, numbers, worst.rank)]
    # The line that makes the samples, where the ranks make them themselves.
    line = None if loader is None or loader.workers else standing(record, record.rank_numbers(), "data_wait")
    if line is not None:
        text = f"the ranks stood at {line.place} in {line.looks} of {line.of} looks during that time{line.others}"
        because.append((text, line.location, {"looks": line.looks, "looks_in_phase": line.of}))
    mean_share = _middle(enough_steps(record))[0]
    if first_ns:
        text = f"it is the first batch of each epoch that waits, {milliseconds_text(first_ns)} on rank {worst.rank}"
        because.append((f"{text}, and the others hardly do", None, {"first_wait_ns": first_ns}, worst.rank))
    elif mean_share >= MUCH_MORE * share:
        text = "these are the figures of the quarter of the steps in the middle; with single long waits it is "
        because.append((f"{text}{mean_share:.0%} of all steps together", None, {"mean_share": mean_share}))
    yield Verdict(
        sentence=f"training waits for data for {share:.0%} of the step ({milliseconds_text(wait_ns)} of "
        f"{milliseconds_text(step_ns)})",
        remedy=_remedy(loader, is_of_first=first_ns > 0),
        what_if=("data=ready",) if loader is None or first_ns else ("workers",),
        locations=None if loader is None else site_location(record.site(loader.site)),
        because=tuple(because),
    )


def _remedy(loader: Loader | None, *, is_of_first: bool) -> str:
    """Return what to do about waits for data; ``is_of_first``: for the first batch of each pass."""
    if loader is None:
        return "Prepare the batches in worker processes, ahead of the step that needs them."
    if not loader.workers:
        return "Give the loader worker processes: num_workers (cores over ranks) and persistent_workers=True."
    if is_of_first and loader.persistent:
        return "Its workers are kept already: let the data set open what it needs before the first sample is asked."
    if is_of_first:
        return (
            "Give the loader persistent_workers=True: its workers start anew for every epoch, and keep up after that."
        )
    kept = "" if loader.persistent else ", or keep the workers between epochs with persistent_workers=True"
    return (
        f"The {loader.workers} workers of each rank do not keep up: give it more, make the samples cheaper (smaller "
        f"files, less decoding){kept}."
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


def sampled_reads(record: RunRecord) -> Iterator[Verdict]:
    """Yield the lines that read in nearly every sampled step, by file; of a line the rank that waits longest counts."""
    phases = summarise(record).phases
    least_ns = 0.0 if phases is None else WAIT_SHARE * phases.step_ns
    by_line: dict[tuple[Location, str], list[tuple[float, int]]] = {}
    for position, read in enumerate(record.host_reads):
        location = site_location(record.site(read.site))
        wait_ns = read.wait_ns / read.steps if read.steps else 0.0
        often = read.steps >= FEWEST_STEPS and read.steps_with >= EVERY_STEP * read.steps
        if location is not None and often and wait_ns >= least_ns:
            by_line.setdefault((location, read.method), []).append((wait_ns, position))
    files: dict[str, list[tuple[Location, str]]] = {}
    for line in by_line:
        files.setdefault(line[0].file, []).append(line)
    for lines in files.values():
        lines.sort(key=lambda line: line[0].line)
        longest = {line: max(by_line[line]) for line in lines}
        worst = max(lines, key=lambda line: longest[line][0])
        places = f" (one of {len(lines)} places)" if len(lines) > 1 else ""
        waits = f"{milliseconds_text(longest[worst][0])} each{places}"
        yield Verdict(
            sentence=f"{_spelled(worst[1])} waits for the GPU in every step, {waits}",
            what_if=("host_syncs=dropped",),
            locations=tuple(dict.fromkeys(location for location, _ in lines)),
            ranks=tuple(sorted({record.host_reads[at].rank for line in lines for _, at in by_line[line]})),
            because=tuple(_read_fact(record.host_reads[longest[line][1]], *line) for line in lines[:8]),
        )


def _read_fact(read: HostRead, location: Location, method: str) -> Reason:
    wait_ns = read.wait_ns / read.steps
    return (
        f"{_spelled(method)} in {read.steps_with} of {read.steps} sampled steps, {read.calls / read.steps:.1f} times "
        f"per step, waiting {milliseconds_text(wait_ns)} of it",
        location,
        {"steps_with": read.steps_with, "steps": read.steps, "wait_ns": wait_ns},
    )


def _spelled(method: str) -> str:
    """Return a read as users spell it."""
    return _SPELLED.get(method, f".{method}()")


# Process groups whose gradients move far slower than the link between their GPUs should carry them.

LEAST_BYTES = 10_000_000
"""Gradients of a step below this are moved in a time that latency decides."""
EXPECTED_SHARE = 0.5
"""Of the standard: NCCL reaches 30 to 80% of it."""


def slow_links(record: RunRecord) -> Iterator[Verdict]:
    """Yield the groups whose bandwidth on the bus is too small a share of their link's all along.

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
        bandwidth, carried = entry.bus_bandwidth_bytes_per_s, entry.limit_bytes_per_s
        assert bandwidth and carried and entry.ns_per_step
        share = bandwidth / carried
        name = next(iter(links)) if len(links) == 1 else "link"
        yield Verdict(
            sentence=f"gradients of {entry.group} move at {bytes_text(round(bandwidth))}/s on the bus, {share:.0%} of "
            f"what {name} carries ({bytes_text(round(carried))}/s)",
            remedy="Look at `nvidia-smi topo -m` and `nvidia-smi nvlink --status`, and at what NCCL_DEBUG=INFO "
            "reports.",
            what_if=(f"link_gbit_per_s={EXPECTED_SHARE * carried * 8 / 1e9:g}",),
            because=(
                f"{bytes_text(round(entry.bytes_per_step))} a step take {milliseconds_text(entry.ns_per_step)}; a "
                f"ring over this link takes {milliseconds_text(entry.ns_per_step * share)} at full speed",
                None,
                {
                    "bus_bandwidth_bytes_per_s": bandwidth,
                    "limit_bytes_per_s": carried,
                    "bytes_per_step": entry.bytes_per_step,
                },
            ),
        )


def _is_slow(entry: Traffic, limit: float) -> bool:
    if entry.bus_bandwidth_bytes_per_s is None or entry.limit_bytes_per_s is None or not entry.ns_per_step:
        return False
    return entry.bytes_per_step >= LEAST_BYTES and entry.bus_bandwidth_bytes_per_s < limit * entry.limit_bytes_per_s


def _shows(group: str, limit: float, summary: RunSummary) -> bool:
    return any(entry.kind == GRADIENTS and entry.group == group and _is_slow(entry, limit) for entry in summary.traffic)
