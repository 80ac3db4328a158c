"""What changes would make of a run, as text for people: best first, each with its interval, its price and its line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.finding import MOST_TIMES, shown_path
from ddpdoctor.report import blocks
from ddpdoctor.report.blocks import Block, Page, Said, Table, notes
from ddpdoctor.report.layout import in_milliseconds, milliseconds, percent, rate
from ddpdoctor.report.streams import one_line
from ddpdoctor.what_if.settings import shown

if TYPE_CHECKING:
    from ddpdoctor.what_if.scenario import Change, Curve, Interval, WhatIf

_LEAST = 0.015
"""Changes that bring less are named in one line."""
_LEGEND = (
    "First column: the speed-up in samples per second, with its 90% prediction interval in brackets; each change on "
    "its own."
)


def page(answer: WhatIf, root: str) -> Page:
    """Return all that is said of the run; paths are relative to ``root``."""
    best = max(answer.changes, key=lambda change: change.speedup.low, default=None)
    gains = best is not None and best.speedup.low > 1
    return Page(
        name=one_line(answer.name) or "the run",
        answer=f"{_times(best.speedup.value)} times as fast with {best.title}"
        if best is not None and gains
        else "nothing that can be changed brings more beyond doubt",
        tone="good" if gains else "",
        groups=(
            _head(answer),
            _changes(answer, root),
            _together(answer),
            *(_curve(curve) for curve in answer.curves if len(curve.points) > 1),
            notes([*answer.notes, *(f"left out: {text}" for text in answer.left_out)]),
        ),
    )


def _head(answer: WhatIf) -> list[Block]:
    nodes = f" on {answer.nodes} nodes" if answer.nodes > 1 else ""
    samples = f", {rate(answer.samples_per_s)} samples/s" if answer.samples_per_s else ""
    text = (
        f"{answer.name or 'the run'} on {answer.ranks} ranks{nodes}: {in_milliseconds(answer.step_ns)} per "
        f"step{samples}. The model reproduces {in_milliseconds(answer.replayed_ns)} ({answer.error:+.1%}, "
        f"{answer.steps} steps), {in_milliseconds(answer.exposed_ns)} of them exposed communication."
    )
    return [Said(text=text), Said(text=f"Links: {answer.links}.", tone="quiet")]


def _changes(answer: WhatIf, root: str) -> list[Block]:
    told = [change for change in answer.changes if len(answer.changes) == 1 or abs(change.speedup.value - 1) >= _LEAST]
    same = [change for change in answer.changes if change not in told]
    found: list[Block] = [_change(change, root) for change in told]
    if same:
        titles = ", ".join(f"{change.title} ({change.memory})" if change.memory else change.title for change in same)
        found.append(Said(label="no noticeable difference", text=titles, indent=27))
    return [*found, Said(text=_LEGEND, tone="quiet")]


def _change(change: Change, root: str) -> blocks.Change:
    where = "" if change.location is None else f"{shown_path(change.location.file, root)}:{change.location.line}: "
    facts = (
        ("step", _figures(change)),
        ("do", f"{where}{change.do}" if change.do else ""),
        ("costs", "; ".join(part for part in (change.memory, change.semantics) if part)),
        ("or", ", ".join(f"{name}: {_times(gain)}" for name, gain in change.others)),
        ("note", change.note),
    )
    return _row(change, change.title, tuple(fact for fact in facts if fact[1]))


def _row(change: Change, title: str, facts: tuple[tuple[str, str], ...] = ()) -> blocks.Change:
    gain = change.speedup
    tone = "good" if gain.low > 1 else "bad" if gain.high < 1 else ""
    most = f"-{_times(gain.high)}" if gain.high < MOST_TIMES else " or more"
    words = f"{_times(gain.value)} ({_times(gain.low)}{most})"
    return blocks.Change(gain=words, tone=tone, title=title, facts=facts)


def _figures(change: Change) -> str:
    samples = change.samples_per_s
    rates = "" if samples is None else f", {rate(samples.value)} samples/s"
    return f"{_spread(change.step_ns)} ms{rates}"


def _together(answer: WhatIf) -> list[Block]:
    """Return the best combination, one change after the other."""
    if not answer.combination:
        return []
    head = "cumulative: each with all above it, for changes that leave the training as it is"
    lines: list[Block] = [Said(text=head, strong=True)]
    before: set[str] = set()
    for change in answer.combination:
        new = {name: value for name, value in change.settings.items() if name not in before}
        before |= set(change.settings)
        alone = next((other.title for other in answer.changes if dict(other.settings) == new), "")
        title = alone or ", ".join(f"{name}={shown(value)}" for name, value in new.items())
        lines.append(_row(change, f"+ {title}"))
    return lines


def _curve(curve: Curve) -> list[Block]:
    what = "the same batch on each rank" if curve.kind == "weak" else "the same global batch"
    table = Table(
        title=f"{curve.kind} scaling ({what})",
        head=("ranks", "nodes", "step, ms", "samples/s", "efficiency", "limited by"),
        rows=tuple(
            (
                str(point.ranks),
                str(point.nodes),
                _spread(point.step_ns),
                rate(point.samples_per_s.value if point.samples_per_s else None),
                percent(point.efficiency.value),
                point.limit,
            )
            for point in curve.points
        ),
    )
    return [table, *([Said(text=f"{curve.serial}.")] if curve.serial else [])]


def _times(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _spread(interval: Interval) -> str:
    return f"{milliseconds(interval.value)} ({milliseconds(interval.low)}-{milliseconds(interval.high)})"
