"""A watched run as text for people: verdict, why, next; then where the time of each rank went, and the findings."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from ddpdoctor.report.finding_text import finding_lines, label
from ddpdoctor.report.layout import (
    in_milliseconds,
    milliseconds,
    note_lines,
    paragraph,
    percent,
    rate,
    seconds,
    size,
    spaced,
    to_string,
)
from ddpdoctor.report.run.run_lines import stall_lines
from ddpdoctor.report.streams import one_line

if TYPE_CHECKING:
    from ddpdoctor.diagnosis.performance.summary import Traffic
    from ddpdoctor.monitor.snapshot import FindingView, RankView, Snapshot
    from ddpdoctor.record.streams.measured import Gpu

RANKS_SHOWN = 16
"""Of more ranks the slowest are shown; all are in the JSON."""
_STYLES = {"healthy": "bold green", "slow": "bold yellow", "broken": "bold red", "unknown": "bold"}
_HEADINGS = ("rank", "step", "p95", "data", "fwd", "bwd", "wait", "xfer", "expl", "opt", "other", "late")
_WARM_UP_AND_PAUSES = 50
_CELLS = 6
_FIRST_CELLS = 4
_LEGEND = (
    "Milliseconds per step, means; step is the median. data: waiting for the loader; wait and xfer: exposed "
    "communication, until the last rank came and after that; expl: explicit collectives; late: what the others waited "
    "for this rank alone."
)


def render(snapshot: Snapshot, root: str, width: int, *, colour: bool) -> str:
    """Render a run for ``width`` columns; paths are relative to ``root``."""
    blocks = [
        _verdict(snapshot, width),
        paragraph(Text(what_was_seen(snapshot)), width, indent=0),
        _standing(snapshot, root),
        _table(snapshot, width),
        [line for traffic in snapshot.traffic for line in paragraph(Text(_traffic(traffic)), width, indent=0)],
        _gpus(snapshot, width),
        *(finding_lines(view.finding, root, width) for view in snapshot.findings if view.until_ns is None),
        _over(snapshot.findings, width),
        note_lines(snapshot.notes, width),
        paragraph(Text(f"Recorded in {one_line(snapshot.run_directory)}", "dim"), width, indent=0, fold=False),
    ]
    return to_string(spaced(blocks), colour=colour)


def _verdict(snapshot: Snapshot, width: int) -> list[Text]:
    verdict = snapshot.verdict
    head = Text.assemble((verdict.state.upper(), _STYLES[verdict.state]), ": ", (one_line(verdict.text), "bold"))
    if verdict.code:
        head.append(f" ({verdict.code})", "dim")
    lines = paragraph(head, width, indent=0)
    for number, why in enumerate(verdict.why):
        lines += label("why" if not number else "   ", Text(one_line(why)), width)
    return lines + (label("next", Text(one_line(verdict.next)), width) if verdict.next else [])


def what_was_seen(snapshot: Snapshot) -> str:
    """Say in one line what ran, how far it came, how fast, and how it ended."""
    ranks = snapshot.world_size or len(snapshot.ranks)
    on = ", ".join(one_line(word) for word in (snapshot.backend, snapshot.device) if word)
    where = f" on {ranks} {'rank' if ranks == 1 else 'ranks'}" if ranks else ""
    parts = [f"{one_line(snapshot.name)}{where}{f' ({on})' if on else ''}"]
    parts.append(f"{snapshot.steps:,} steps{_newest(snapshot)}" if snapshot.steps is not None else "no steps")
    if snapshot.started_at_ns:
        parts.append(f"{seconds((snapshot.ended_at_ns or snapshot.now_ns) - snapshot.started_at_ns)} in all")
        if snapshot.steps is not None and snapshot.phases is not None:  # The rest: start-up, evaluation, checkpoints.
            parts[-1] += f" (about {seconds(round(snapshot.steps * snapshot.phases.step_ns))} of it in steps)"
    if snapshot.steps_per_s is not None:
        parts.append(f"{rate(snapshot.steps_per_s)} steps/s")
    if snapshot.samples_per_s is not None:
        parts.append(f"{rate(snapshot.samples_per_s)} samples/s{_scaling(snapshot, ranks)}")
    if snapshot.overlap_ratio is not None:
        parts.append(f"{percent(snapshot.overlap_ratio)} of the communication hidden")
    if snapshot.efficiency is not None:
        parts.append(f"estimated efficiency {percent(snapshot.efficiency)}")
    end = {None: "", 0: "; it ended normally"}.get(snapshot.exit_code, f"; its exit code is {snapshot.exit_code}")
    return ", ".join(parts) + end + "."


def _scaling(snapshot: Snapshot, ranks: int) -> str:
    """Compare with so many times one rank, where a run on one rank was named."""
    if snapshot.scaling_efficiency is None or snapshot.one_rank_samples_per_s is None:
        return ""
    one = rate(snapshot.one_rank_samples_per_s)
    return f" ({percent(snapshot.scaling_efficiency)} of {ranks} times the {one} of one rank)"


def _newest(snapshot: Snapshot) -> str:
    """Say that the figures are those of the newest steps, where they leave out more than a warm-up."""
    measured = min((rank.measured_steps for rank in snapshot.ranks), default=0)
    left_out = measured and (snapshot.steps or 0) > 1.1 * measured + _WARM_UP_AND_PAUSES
    return f" (figures of the newest {measured:,})" if left_out else ""


def _standing(snapshot: Snapshot, root: str) -> list[Text]:
    """Return what a job stands in; of one that has ended the verdict and its finding say it."""
    if snapshot.stall is None or (snapshot.state == "ended" and snapshot.verdict.code):
        return []
    return [Text(line) for line in stall_lines(snapshot.stall, root)]


def _table(snapshot: Snapshot, width: int) -> list[Text]:
    measured = [rank for rank in snapshot.ranks if rank.phases is not None]
    if not measured:
        return []
    shown = measured
    if len(measured) > RANKS_SHOWN:
        worst = sorted(measured, key=lambda rank: -(rank.late_ns or 0.0))[:RANKS_SHOWN]
        shown = sorted(worst, key=lambda rank: rank.rank)
    # Of a rank that broke the job it is no matter that its optimizer was a little slow.
    is_slow = snapshot.verdict.state != "broken"
    late = [rank.late_phase.replace("_", " ") if is_slow and rank.culprit else "" for rank in shown]
    columns = _fitting([_figures(rank) for rank in shown], width - max(map(len, late)) - 1)
    lines = [Text(_cells(_HEADINGS[at] for at in columns), "bold")]
    for rank, phase in zip(shown, late, strict=True):
        row = (str(rank.rank), *map(milliseconds, _figures(rank)))
        lines.append(Text(f"{_cells(row[at] for at in columns)} {phase}".rstrip(), "bold" if rank.culprit else ""))
    if len(shown) < len(measured):
        lines.append(Text(f"... the {len(shown)} latest of {len(measured)} ranks; all are in the JSON"))
    left_out = [heading for at, heading in enumerate(_HEADINGS) if at not in columns]
    narrow = f" No room for {', '.join(left_out)}." if left_out else ""
    return lines + paragraph(Text(_LEGEND + narrow, "dim"), width, indent=0)


def _figures(rank: RankView) -> tuple[float | None, ...]:
    phases, times = rank.phases, rank.step_times
    parts = phases.parts_ns().values() if phases is not None else ()
    return rank.median_ns, times.p95_ns if times is not None else None, *parts, rank.late_ns


def _fitting(rows: Sequence[Sequence[float | None]], width: int) -> list[int]:
    """Return the columns that there is room for, without those of the shortest times; rank and late always stay."""
    room = (width - _FIRST_CELLS) // _CELLS - 1
    longest = sorted(range(len(rows[0]) - 1), key=lambda at: -max(row[at] or 0.0 for row in rows))
    return [0, *sorted(at + 1 for at in longest[: max(1, room)]), len(rows[0])]


def _cells(words: Iterable[str]) -> str:
    """Return the words right-aligned in columns; the first is a rank, which needs less room."""
    return "".join(f"{word:>{_CELLS}}" for word in words)[_CELLS - _FIRST_CELLS :]


def _traffic(traffic: Traffic) -> str:
    parts = [f"{rate(traffic.calls_per_step)} calls and {size(traffic.bytes_per_step)} per step"]
    if traffic.ns_per_step is not None:
        parts.append(in_milliseconds(traffic.ns_per_step))
    if traffic.overlap_ratio is not None:
        parts.append(f"{percent(traffic.overlap_ratio)} hidden")
    if traffic.bus_bandwidth_bytes_per_s is not None:
        parts.append(f"bus bandwidth at least {size(traffic.bus_bandwidth_bytes_per_s)}/s")
    if traffic.limit_bytes_per_s is not None:
        parts.append(f"the link gives {size(traffic.limit_bytes_per_s)}/s")
    return f"{one_line(traffic.kind)} ({one_line(traffic.group)}): {', '.join(parts)}"


def _gpus(snapshot: Snapshot, width: int) -> list[Text]:
    lines = [line for gpu in snapshot.gpus for line in paragraph(Text(_gpu(gpu)), width, indent=0)]
    computing = snapshot.gpu_utilisation_corrected_percent
    if snapshot.gpu_utilisation_percent is not None and computing is not None:
        busy = f"GPUs: {snapshot.gpu_utilisation_percent:.0f}% busy"
        lines.append(Text(f"{busy}, {computing:.0f}% excluding waits in communication kernels"))
    return lines


def _gpu(gpu: Gpu) -> str:
    parts = []
    if gpu.samples:
        newest = gpu.samples[-1]
        if newest.utilisation_percent is not None:
            parts.append(f"{newest.utilisation_percent:.0f}% busy")
        if newest.memory_used_bytes is not None:
            parts.append(f"{size(newest.memory_used_bytes)} of {size(gpu.memory_total_bytes)}")
        if newest.power_w is not None:
            limit = f" of {gpu.power_limit_w:.0f}" if gpu.power_limit_w is not None else ""
            parts.append(f"{newest.power_w:.0f}{limit} W")
        if newest.sm_clock_mhz is not None:
            parts.append(f"{newest.sm_clock_mhz} MHz")
        if newest.temperature_c is not None:
            parts.append(f"{newest.temperature_c:.0f} °C")
        parts += [f"throttled: {', '.join(newest.throttle_reasons)}"] if newest.throttle_reasons else []
    ranks = f" (rank {', '.join(map(str, gpu.ranks))})" if gpu.ranks else ""
    return f"GPU {gpu.index}{ranks} {one_line(gpu.name)}: {', '.join(parts) or 'no data'}"


def _over(views: Sequence[FindingView], width: int) -> list[Text]:
    """Findings that held for a while."""
    lines: list[Text] = []
    for view in views:
        if view.until_ns is not None:
            span = f"{_clock(view.since_ns)}-{_clock(view.until_ns)}"
            text = f"{span} {view.finding.name} ({view.finding.code}): {one_line(view.finding.title)}"
            lines += paragraph(Text(text), width, Text("for a while", "bold"), indent=13)
    return lines


def _clock(at_ns: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_ns / 1e9))
