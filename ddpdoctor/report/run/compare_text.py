"""Two runs side by side, as text for people and as JSON for machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from rich.text import Text

from ddpdoctor.report.escape import one_line
from ddpdoctor.report.formats.json import HEAD, indented
from ddpdoctor.report.layout import UNKNOWN, cut, milliseconds, paragraph, rate, size, spaced, to_string

if TYPE_CHECKING:
    from ddpdoctor.diagnosis.performance.run_comparison import Amount, Difference, RunComparison
    from ddpdoctor.finding import Finding


def render(
    compared: RunComparison,
    gone: list[Finding],
    come: list[Finding],
    allowed: float,
    width: int,
    *,
    colour: bool,
) -> str:
    """Render for ``width`` columns."""
    blocks = [
        _verdict(compared, allowed, width),
        [
            Text(f"{'':<26}{'before':>10}{'after':>10}  change"),
            *(_row(entry) for entry in (compared.step, *compared.phases)),
            *(_amount(entry) for entry in compared.amounts),
        ],
        [line for finding in come for line in _finding("come", finding, width)]
        + [line for finding in gone for line in _finding("gone", finding, width)],
        _settings(compared, width),
    ]
    return to_string(spaced(blocks), colour=colour)


def as_json(compared: RunComparison, gone: list[Finding], come: list[Finding], allowed: float) -> str:
    """Render as indented JSON that ends with a line feed; times are nanoseconds."""

    def as_object(finding: Finding) -> dict[str, Any]:
        return {"code": finding.code, "name": finding.name, "title": finding.title, "fingerprint": finding.fingerprint}

    content = {
        **HEAD,
        "regression": compared.is_regression(allowed),
        "allowed": allowed,
        **msgspec.to_builtins(compared),
        "settings": [{"name": name, "before": one, "after": other} for name, one, other in compared.settings],
        "findings_come": list(map(as_object, come)),
        "findings_gone": list(map(as_object, gone)),
    }
    return indented(content)


def _verdict(compared: RunComparison, allowed: float, width: int) -> list[Text]:
    step = compared.step
    interval = f"{step.low - 1:+.1%} to {step.high - 1:+.1%}"
    change = f"{abs(step.ratio - 1):.1%} {'longer' if step.ratio > 1 else 'shorter'}"
    if compared.is_regression(allowed):
        head, style = f"SLOWER: a step is {change} ({interval}), beyond the {allowed:.0%} allowed", "red"
    elif not step.is_change:
        head, style = f"NO CHANGE: a step is {change}, and {interval} is within the noise", ""
    elif step.ratio > 1:
        head, style = f"A LITTLE SLOWER: a step is {change} ({interval}), which {allowed:.0%} allowed covers", "yellow"
    else:
        head, style = f"FASTER: a step is {change} ({interval})", "green"
    differ = " and ".join(compared.other_work)
    note = f"not the same work: the runs differ in {differ}, so compare samples/s" if differ else ""
    beside = paragraph(Text(note), width, Text("note", "bold"), 6) if note else []
    return paragraph(Text(head, f"bold {style}".strip()), width, indent=0) + beside


def _row(entry: Difference) -> Text:
    text = f"{entry.name + ', ms':<26}{milliseconds(entry.before_ns):>10}{milliseconds(entry.after_ns):>10}  "
    if entry.before_ns <= 0 or entry.ratio > 99:
        return Text(text + "new" if entry.after_ns else text)
    text += f"{entry.ratio - 1:+.1%} ({entry.low - 1:+.1%} to {entry.high - 1:+.1%})"
    return Text(text if entry.is_change else text + " noise", "" if entry.is_change else "dim")


def _amount(entry: Amount) -> Text:
    def written(value: float | None) -> str:
        if value is None:
            return UNKNOWN
        if "bytes" in entry.name:
            return size(value)
        return f"{value:.0%}" if "share" in entry.name else f"{value:g}" if entry.name == "ranks" else rate(value)

    return Text(f"{entry.name:<26}{written(entry.before):>10}{written(entry.after):>10}")


def _finding(word: str, finding: Finding, width: int) -> list[Text]:
    label = Text(word, "bold red" if word == "come" else "bold green")
    return paragraph(Text(one_line(f"{finding.name} ({finding.code}): {finding.title}")), width, label, 6)


def _settings(compared: RunComparison, width: int) -> list[Text]:
    lines = []
    for name, before, after in compared.settings:
        text = f"{one_line(name)}: {cut(one_line(before) or 'not set', 60)} -> {cut(one_line(after) or 'not set', 60)}"
        lines += paragraph(Text(text), width, Text("set", "bold"), 6)
    return lines
