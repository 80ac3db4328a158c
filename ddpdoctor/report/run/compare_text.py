"""Two runs side by side, as text for people and as JSON for machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ddpdoctor.report.blocks import Page, Said, Table, notes
from ddpdoctor.report.formats.json import HEAD, indented
from ddpdoctor.report.layout import UNKNOWN, cut, milliseconds, rate, size
from ddpdoctor.report.streams import one_line

if TYPE_CHECKING:
    from ddpdoctor.diagnosis.performance.run_comparison import Amount, Difference, RunComparison
    from ddpdoctor.finding import Finding


def page(compared: RunComparison, gone: list[Finding], come: list[Finding], allowed: float, name: str) -> Page:
    """Return all that is said of two runs; ``name`` names both."""
    tone, answer = _verdict(compared, allowed)
    differ = " and ".join(compared.other_work)
    note = f"not the same work: the runs differ in {differ}, so compare samples/s" if differ else ""
    timed = (compared.step, *compared.phases)
    table = Table(
        head=("", "before", "after", "change"),
        rows=(*map(_row, timed), *map(_amount, compared.amounts)),
        quiet=frozenset(number for number, entry in enumerate(timed) if not entry.is_change),
        figures=frozenset({1, 2}),
    )
    return Page(
        name=name,
        answer=answer,
        tone=tone,
        groups=(
            [Said(text=answer, tone=tone, strong=True), *notes([note] if note else [])],
            [table],
            [_finding("come", "bad", finding) for finding in come]
            + [_finding("gone", "good", finding) for finding in gone],
            [
                Said(label="set", text=f"{name}: {_setting(before)} -> {_setting(after)}", indent=6)
                for name, before, after in compared.settings
            ],
        ),
    )


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


def _verdict(compared: RunComparison, allowed: float) -> tuple[str, str]:
    """Return tone and sentence."""
    step = compared.step
    interval = f"{step.low - 1:+.1%} to {step.high - 1:+.1%}"
    change = f"{abs(step.ratio - 1):.1%} {'longer' if step.ratio > 1 else 'shorter'}"
    if compared.is_regression(allowed):
        return "bad", f"SLOWER: a step is {change} ({interval}), beyond the {allowed:.0%} allowed"
    if not step.is_change:
        return "", f"NO CHANGE: a step is {change}, and {interval} is within the noise"
    if step.ratio > 1:
        return "doubt", f"A LITTLE SLOWER: a step is {change} ({interval}), which {allowed:.0%} allowed covers"
    return "good", f"FASTER: a step is {change} ({interval})"


def _row(entry: Difference) -> tuple[str, ...]:
    figures = (f"{entry.name}, ms", milliseconds(entry.before_ns), milliseconds(entry.after_ns))
    if entry.before_ns <= 0 or entry.ratio > 99:
        return (*figures, "new" if entry.after_ns else "")
    change = f"{entry.ratio - 1:+.1%} ({entry.low - 1:+.1%} to {entry.high - 1:+.1%})"
    return (*figures, change if entry.is_change else f"{change} noise")


def _amount(entry: Amount) -> tuple[str, ...]:
    def written(value: float | None) -> str:
        if value is None:
            return UNKNOWN
        if "bytes" in entry.name:
            return size(value)
        return f"{value:.0%}" if "share" in entry.name else f"{value:g}" if entry.name == "ranks" else rate(value)

    return (entry.name, written(entry.before), written(entry.after), "")


def _finding(word: str, tone: str, finding: Finding) -> Said:
    return Said(label=word, tone=tone, text=f"{finding.name} ({finding.code}): {finding.title}", indent=6)


def _setting(value: str) -> str:
    return cut(one_line(value) or "not set", 60)
