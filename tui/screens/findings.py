"""The page of findings, and that of one finding with its explanation."""

from __future__ import annotations

from ddpdoctor.finding import Finding, Severity, rank_list
from ddpdoctor.monitor.snapshot import FindingView
from ddpdoctor.tui.draw.cells import EMPTY, Cell, Line, Painting, line, paragraph, scrolled, shown, stacked
from ddpdoctor.tui.draw.figures import span
from ddpdoctor.tui.draw.table import Column, paint_table, text_column
from ddpdoctor.tui.screens.sections import SEVERITY_ROLES, heading, since_when, stack_lines
from ddpdoctor.tui.view import View

FACTS = 6
_ORDER = tuple(Severity)


def key_of(found: FindingView) -> str:
    """Key of a finding's row."""
    finding = found.finding
    return f"{finding.code}/{finding.fingerprint or finding.title}/{found.since_ns}"


def paint_findings(view: View, width: int, height: int) -> Painting:
    """Draw the list above the evidence and remedy of the selected finding."""
    rows = finding_rows(view)
    remark = f"filtered by {shown(view.filter)}" if view.filter else ""
    head = heading(f"Findings ({len(rows)})", width, view.glyphs, remark)
    if not rows:
        text = "no finding matches the filter" if view.filter else "nothing found so far"
        return stacked(height, [head, line(Cell(f"  {view.glyphs.good} ", "good"), Cell(text, "dim"))])
    room = max(3, min(len(rows) + 1, height // 2))
    table = paint_table(rows, _columns(view), key_of, view.cursor, width, room, view.glyphs)
    selected = next((row for row in rows if key_of(row) == view.cursor.selected), rows[0])
    return stacked(height, [head], table, [EMPTY], _details(selected, view, width))


def finding_rows(view: View) -> list[FindingView]:
    """Return the findings that the filter leaves: those that hold first, the worst first."""
    words = view.filter.lower().split()
    rows = [found for found in view.snapshot.findings if all(word in _searched(found.finding) for word in words)]
    return sorted(
        rows,
        key=lambda found: (found.until_ns is not None, _ORDER.index(found.finding.severity), -found.since_ns),
    )


def _searched(finding: Finding) -> str:
    return f"{finding.severity.value} {finding.name} {finding.code} {finding.title}".lower()


def _columns(view: View) -> list[Column[FindingView]]:
    glyphs = view.glyphs
    signs = {Severity.ERROR: glyphs.bad, Severity.WARNING: glyphs.warning, Severity.ADVICE: glyphs.advice}

    def severity(found: FindingView, width: int) -> Cell:
        role = "dim" if found.until_ns is not None else SEVERITY_ROLES[found.finding.severity]
        return Cell(f"{signs[found.finding.severity]} {found.finding.severity.value}", role)

    def since(found: FindingView, width: int) -> Cell:
        if found.until_ns is not None:
            return Cell(f"over for {span(view.snapshot.now_ns - found.until_ns)}", "dim")
        return Cell(since_when(found, view.snapshot))

    def title(found: FindingView, width: int) -> Cell:
        return Cell(shown(found.finding.title), "dim" if found.until_ns is not None else "")

    return [
        Column(name="severity", title="severity", width=9, importance=1, cell=severity),
        Column(name="title", title="what", width=40, most=-1, importance=2, cell=title),
        text_column(
            "name", "check", lambda found: Cell(shown(found.finding.name), "dim"), width=22, most=32, importance=4
        ),
        Column(name="since", title="since when", width=19, importance=3, cell=since),
    ]


def _details(found: FindingView, view: View, width: int) -> list[Line]:
    finding = found.finding
    remark = f"{shown(finding.name)} {shown(finding.code)}, Enter explains it"
    lines = [heading("The selected finding", width, view.glyphs, remark)]
    lines += paragraph(finding.title, width - 2, "strong", Cell("  "))
    return (
        lines
        + _grounds(finding, view, width)
        + paragraph(finding.remedy, width - 2, "strong", Cell("  do     ", SEVERITY_ROLES[finding.severity]))
        + _gain(finding, width - 2)
    )


def _gain(finding: Finding, width: int) -> list[Line]:
    """Return what mending it alone is predicted to bring."""
    return [] if finding.gain is None else paragraph(finding.gain.text, width, "", Cell("  gain   ", "dim"))


def _grounds(finding: Finding, view: View, width: int) -> list[Line]:
    """Return where it is, which ranks it concerns, and the evidence."""
    lines: list[Line] = []
    if finding.location is not None:
        place = finding.location
        function = f" in {place.function}" if place.function else ""
        lines += paragraph(
            f"{view.place(place.file, place.line)}{function}", width - 2, "code", Cell("  at     ", "dim")
        )
    if finding.ranks:
        lines.append(line(Cell("  ranks  ", "dim"), rank_list(finding.ranks)))
    for number, fact in enumerate(finding.evidence[:FACTS]):
        lines += paragraph(fact.text, width - 2, "", Cell("  seen   " if number == 0 else "         ", "dim"))
    if len(finding.evidence) > FACTS:
        lines.append(line(Cell(f"         and {len(finding.evidence) - FACTS} more facts in the export", "dim")))
    return lines


def paint_finding(view: View, width: int, height: int) -> Painting:
    """Draw one finding in full: evidence, stacks, remedy, and what its check looks for."""
    found = next((found for found in view.snapshot.findings if key_of(found) == view.opened), None)
    if found is None:
        return stacked(height, [line(Cell("  this finding is no longer in the run", "dim"))])
    finding = found.finding
    role = SEVERITY_ROLES[finding.severity]
    head = f"{finding.severity.value}: {shown(finding.name)}"
    remark = ", ".join(filter(None, (shown(finding.code), since_when(found, view.snapshot))))
    lines = [heading(head, width, view.glyphs, remark)]
    lines += paragraph(finding.title, width - 4, "strong", Cell("  "))
    lines += [EMPTY, *_grounds(finding, view, width)]
    for fact in finding.evidence:
        if fact.stack:
            who = "" if fact.rank is None else f"rank {fact.rank}"
            lines.append(line(Cell(f"  stack  {who}", "dim")))
            lines += [line("         ", *cells) for cells in stack_lines(fact.stack, width - 12, view)]
    lines += [EMPTY, *paragraph(finding.remedy, width - 4, "strong", Cell("  do     ", role))]
    lines += _gain(finding, width - 4)
    if view.explanation:
        lines += [EMPTY, heading("What the check looks for", width, view.glyphs)]
        for words in view.explanation.splitlines():
            lines.append(line("  ", Cell(shown(words.rstrip()) if words.strip() == words else _indented(words))))
    return scrolled(lines, view.scroll, height)


def _indented(words: str) -> str:
    """Return a line of a listing keeps its indentation."""
    return " " * (len(words) - len(words.lstrip())) + shown(words)
