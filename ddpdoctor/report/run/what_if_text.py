"""What changes would make of a run, as text for people: best first, each with its interval, its price and its line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from rich.text import Text

from ddpdoctor.finding import MOST_TIMES
from ddpdoctor.findings.locations import shown_path
from ddpdoctor.report.escape import one_line
from ddpdoctor.report.formats.json import HEAD, indented
from ddpdoctor.report.layout import in_milliseconds, milliseconds, paragraph, percent, rate, spaced, to_string

if TYPE_CHECKING:
    from ddpdoctor.what_if.scenario import Change, Curve, Interval, WhatIf

_INDENT = 10
_GAINS = 20
_LEAST = 0.015
"""Changes that bring less are named in one line."""
_LEGEND = (
    "First column: the speed-up in samples per second, with its 90% prediction interval in brackets; each change on "
    "its own."
)


def render(answer: WhatIf, root: str, width: int, *, colour: bool) -> str:
    """Render for ``width`` columns; paths are relative to ``root``."""
    blocks = [_head(answer, width), _table(answer, root, width), _together(answer, width)]
    blocks += [_curve(curve, width) for curve in answer.curves if len(curve.points) > 1]
    notes = [*answer.notes, *(f"left out: {text}" for text in answer.left_out)]
    blocks.append([line for note in notes for line in paragraph(Text(one_line(note)), width, Text("note", "bold"), 6)])
    return to_string(spaced(blocks), colour=colour)


def _head(answer: WhatIf, width: int) -> list[Text]:
    nodes = f" on {answer.nodes} nodes" if answer.nodes > 1 else ""
    text = Text.assemble(
        (one_line(answer.name) or "the run", "bold"),
        f" on {answer.ranks} ranks{nodes}: {in_milliseconds(answer.step_ns)} per step",
        f", {rate(answer.samples_per_s)} samples/s" if answer.samples_per_s else "",
        f". The model reproduces {in_milliseconds(answer.replayed_ns)} ({answer.error:+.1%}, {answer.steps} steps), "
        f"{in_milliseconds(answer.exposed_ns)} of them exposed communication.",
    )
    return [
        *paragraph(text, width, indent=0),
        *paragraph(Text(f"Links: {one_line(answer.links)}.", "dim"), width, indent=0),
    ]


def _table(answer: WhatIf, root: str, width: int) -> list[Text]:
    lines: list[Text] = []
    told = [change for change in answer.changes if len(answer.changes) == 1 or abs(change.speedup.value - 1) >= _LEAST]
    for change in told:
        lines += _change(change, root, width)
    same = [change for change in answer.changes if change not in told]
    if same:
        titles = ", ".join(f"{change.title} ({change.memory})" if change.memory else change.title for change in same)
        lines += paragraph(Text(one_line(titles)), width, Text("no noticeable difference", "bold"), 27)
    return [*lines, *paragraph(Text(_LEGEND, "dim"), width, indent=0)]


def _change(change: Change, root: str, width: int) -> list[Text]:
    lines = _row(change, one_line(change.title), width)
    where = "" if change.location is None else f"{shown_path(change.location.file, root)}:{change.location.line}: "
    others = ", ".join(f"{name}: {_times(gain)}" for name, gain in change.others)
    for name, text in (
        ("step", _figures(change)),
        ("do", f"{where}{change.do}" if change.do else ""),
        ("costs", "; ".join(part for part in (change.memory, change.semantics) if part)),
        ("or", others),
        ("note", change.note),
    ):
        if text:
            lines += paragraph(Text(one_line(text)), width, Text(f"    {name}", "dim"), _INDENT)
    return lines


def _row(change: Change, title: str, width: int) -> list[Text]:
    gain = change.speedup
    style = "bold green" if gain.low > 1 else "bold red" if gain.high < 1 else "bold"
    most = f"-{_times(gain.high)}" if gain.high < MOST_TIMES else " or more"
    figures = f"{f'{_times(gain.value)} ({_times(gain.low)}{most})':<{_GAINS}}"
    return paragraph(Text(title, "bold"), width, Text(figures, style), _GAINS)


def _figures(change: Change) -> str:
    samples = change.samples_per_s
    rates = "" if samples is None else f", {rate(samples.value)} samples/s"
    return f"{_spread(change.step_ns)} ms{rates}"


def _together(answer: WhatIf, width: int) -> list[Text]:
    """Return the best combination, one change after the other."""
    if not answer.combination:
        return []
    lines = [Text("cumulative: each with all above it, for changes that leave the training as it is", "bold")]
    before: set[str] = set()
    for change in answer.combination:
        new = {name: value for name, value in change.settings.items() if name not in before}
        before |= set(change.settings)
        alone = next((other.title for other in answer.changes if dict(other.settings) == new), "")
        title = alone or ", ".join(f"{name}={_value(value)}" for name, value in new.items())
        lines += _row(change, f"+ {one_line(title)}", width)
    return lines


def _curve(curve: Curve, width: int) -> list[Text]:
    what = "the same batch on each rank" if curve.kind == "weak" else "the same global batch"
    lines = [
        Text(f"{curve.kind} scaling ({what})", "bold"),
        Text(f"{'ranks':<7}{'nodes':<7}{'step, ms':<24}{'samples/s':<11}{'efficiency':<12}limited by"),
    ]
    for point in curve.points:
        samples = point.samples_per_s
        lines.append(
            Text(
                f"{point.ranks:<7}{point.nodes:<7}{_spread(point.step_ns):<24}"
                f"{rate(samples.value if samples else None):<11}{percent(point.efficiency.value):<12}{point.limit}"
            )
        )
    return [*lines, *(paragraph(Text(curve.serial + "."), width, indent=0) if curve.serial else [])]


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _times(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _spread(interval: Interval) -> str:
    return f"{milliseconds(interval.value)} ({milliseconds(interval.low)}-{milliseconds(interval.high)})"


def as_json(answer: WhatIf) -> str:
    """Render as indented JSON that ends with a line feed."""
    return indented({**HEAD, **msgspec.to_builtins(answer)})
