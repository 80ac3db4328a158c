"""What a gate compared, as text: the budget against the baseline, and what is said beside it."""

from __future__ import annotations

from rich.text import Text

from ddpdoctor.examination import Figure, GateSection
from ddpdoctor.gate.budget import amount, percent, share
from ddpdoctor.report.layout import note_lines, paragraph
from ddpdoctor.report.streams import one_line

_STYLES = {"grown": "bold red", "within": "yellow", "shrunk": "green"}
LINES_SHOWN = 4
"""Lines that are named below a figure that changed."""


def lines_of(section: GateSection, width: int) -> list[Text]:
    """Return the block of a gate."""
    lines: list[Text] = []
    if section.figures:
        lines += _heading(section, width)
        labels = max(len(figure.label) for figure in section.figures)
        for figure in section.figures:
            lines += _figure(figure, labels, width)
    if section.times is not None:
        lines += paragraph(Text(times_sentence(section)), width, indent=0)
    return lines + note_lines(notes_of(section), width)


def times_sentence(section: GateSection) -> str:
    """Return what the paired runs say of the time of a step."""
    times = section.times
    if times is None:
        return ""
    if times.note:
        return f"time of a step: {times.note}"
    return (
        f"time of a step: {times.before_ms:.1f} ms before, {times.now_ms:.1f} ms now, {times.change:+.1%} (95% "
        f"interval of {times.pairs} pairs: {times.low:+.1%} to {times.high:+.1%}, allowed {percent(times.allowed)})"
    )


def commands_of(section: GateSection) -> list[tuple[str, str]]:
    """Return what a reader may do with the result, with the command that does it."""
    told = (("To run it again", section.reproduce), ("To accept it", section.accept))
    return [(what, one_line(command)) for what, command in told if command]


def notes_of(section: GateSection) -> list[str]:
    """Return what else a gate has to say, in sentences."""
    notes = []
    if section.written:
        notes.append(f"{section.against} is written: commit it")
    elif section.known:
        what, them = ("finding is", "it") if section.known == 1 else ("findings are", "them")
        notes.append(f"{section.known} known {what} still there, as {section.against} has {them}")
    return [*notes, *section.notes]


def _heading(section: GateSection, width: int) -> list[Text]:
    steps = f"{section.steps} steps compared" if section.steps else "no step compared"
    allowed = f", {percent(section.allowed_growth)} growth allowed" if section.allowed_growth else ""
    beside = "" if section.written else f" against {one_line(section.against)}"
    return paragraph(Text(f"budget{beside} ({steps}{allowed})", "bold"), width, indent=0)


def _figure(figure: Figure, labels: int, width: int) -> list[Text]:
    now = amount(figure, figure.now)
    if figure.before is None or figure.change == "same":
        value = Text(now)
    else:
        value = Text(f"{amount(figure, figure.before)} → {now}  {share(figure)}", _STYLES.get(figure.change, ""))
    lines = [Text.assemble("  ", figure.label.ljust(labels), "  ", value)]
    for difference in figure.differences[:LINES_SHOWN]:
        was, then = amount(figure, difference.before), amount(figure, difference.now)
        told = one_line(f"{difference.shown}  {difference.what}: {was} → {then}")
        lines += paragraph(Text(told, "dim"), width, indent=6)
    if len(figure.differences) > LINES_SHOWN:
        lines.append(Text(f"      and {len(figure.differences) - LINES_SHOWN} more lines", "dim"))
    return lines
