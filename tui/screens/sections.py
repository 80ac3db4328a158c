"""Parts that several pages have in common: headings, the verdict, finding lines, stacks."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len

from ddpdoctor.files.untrusted import line_of
from ddpdoctor.finding import Frame, Severity, in_user_code
from ddpdoctor.monitor.snapshot import FindingView, Snapshot
from ddpdoctor.tui.draw.cells import Cell, Line, cut, cut_left, fitted, in_role, line, paragraph, shown, width_of
from ddpdoctor.tui.draw.figures import span
from ddpdoctor.tui.draw.glyphs import Glyphs
from ddpdoctor.tui.view import View

SEVERITY_ROLES = {Severity.ERROR: "bad", Severity.WARNING: "warning", Severity.ADVICE: "advice"}
VERDICT_ROLES = {"healthy": "good", "slow": "warning", "broken": "bad", "unknown": "advice"}
STACK_FRAMES = 8
VERDICT_MOST = 3
"""Lines of what is wrong, and of what to do: enough for any sentence of a check at 80 columns."""


def heading(title: str, width: int, glyphs: Glyphs, right: str = "", right_role: str = "dim") -> Line:
    """Return a title on a horizontal rule, with a remark at its right end."""
    title = cut(title, max(4, width - 6), glyphs.dots)
    room = width - cell_len(title) - 8
    end = f" {cut(right, room, glyphs.dots)} " if right and room > 3 else ""
    filled = max(0, width - cell_len(title) - cell_len(end) - (4 if end else 3))
    return line(
        Cell(glyphs.rule, "faint"),
        Cell(f" {title} ", "strong"),
        Cell(glyphs.rule * filled, "faint"),
        Cell(end, right_role),
        Cell(glyphs.rule if end else "", "faint"),
    )


def aged_heading(title: str, view: View, at_ns: int | None, width: int, remark: str = "") -> Line:
    """Return a heading that says how old the figures below it are once they are stale."""
    freshness, words = view.age(at_ns)
    if freshness == "stale":
        return heading(title, width, view.glyphs, words, "warning")
    return heading(title, width, view.glyphs, remark)


def as_fresh(lines: Sequence[Line], view: View, at_ns: int | None) -> list[Line]:
    """Dim lines whose figures are old."""
    if view.age(at_ns)[0] in {"old", "stale"}:
        return [in_role(cells, "dim") for cells in lines]
    return list(lines)


def verdict_lines(view: View, width: int, most: int) -> list[Line]:
    """Return what is wrong, for how long, why, and what to do; of the reasons no more than fit into ``most`` lines."""
    verdict, snapshot = view.snapshot.verdict, view.snapshot
    role = VERDICT_ROLES[verdict.state]
    word = "STALLED" if snapshot.state == "stalled" else verdict.state.upper()
    since = "" if verdict.since_ns is None else lasting(snapshot, verdict.since_ns)
    room = width - 2 - (cell_len(since) + 2 if since else 0)
    text = shown(verdict.text)
    badge = Cell(f" {word} ", f"badge.{role}")
    told = paragraph(text[:1].upper() + text[1:], room - 1, "strong", badge, VERDICT_MOST)
    told = [(cells[0], Cell(" "), *cells[1:]) for cells in told]
    if since:
        told[0] = line(*fitted(told[0], room, view.glyphs.dots), Cell(f"  {since}", role))
    steps: list[Line] = []
    if verdict.next:
        steps = paragraph(verdict.next, width - 3, "strong", Cell("do   ", role), VERDICT_MOST)
    whys: list[Line] = []
    for number, why in enumerate(verdict.why):
        whys += paragraph(why, width - 3, "", Cell("why  " if number == 0 else "     ", "dim"), most=2)
    room_for_why = max(0, most - len(told) - len(steps))
    edge = Cell(f"{view.glyphs.cursor if not view.glyphs.plain else view.glyphs.bar_between} ", f"edge.{role}")
    return [line(edge, *cells) for cells in (*told, *whys[:room_for_why], *steps)]


def lasting(snapshot: Snapshot, since_ns: int) -> str:
    """Return for how long something has held, as ``for 14 s``; empty where that is not known, as of a dead job."""
    return "" if snapshot.source == "autopsy" else f"for {span((snapshot.ended_at_ns or snapshot.now_ns) - since_ns)}"


def since_when(found: FindingView, snapshot: Snapshot) -> str:
    """Return for how long a finding has held; in an autopsy what it is: the first cause, or what followed from it."""
    if snapshot.source == "autopsy":
        return {"cause": "first cause", "echo": "followed"}.get(found.finding.role, "")
    return lasting(snapshot, found.since_ns)


def finding_line(found: FindingView, view: View, width: int) -> Line:
    """Return one finding on one line: how bad, what, since when."""
    finding = found.finding
    role = SEVERITY_ROLES[finding.severity]
    over = found.until_ns is not None
    if found.until_ns is not None:
        when = f"over for {span(view.snapshot.now_ns - found.until_ns)}"
    else:
        when = since_when(found, view.snapshot)
    sign = {"bad": view.glyphs.bad, "warning": view.glyphs.warning, "advice": view.glyphs.advice}[role]
    room = max(8, width - 14 - cell_len(when) - 2)
    return line(
        Cell(f"  {sign} {finding.severity.value:<8}", "dim" if over else role),
        Cell("  "),
        *fitted((Cell(cut(shown(finding.title), room, view.glyphs.dots), "dim" if over else ""),), room),
        Cell(f" {when}", "dim"),
    )


def stack_lines(stack: Sequence[Frame], width: int, view: View) -> list[Line]:
    """Frames of the user's code, innermost first, the source line below the first."""
    glyphs = view.glyphs
    frames = [frame for frame in stack if in_user_code(frame.file)] or list(stack)
    lines: list[Line] = []
    for number, frame in enumerate(frames[:STACK_FRAMES]):
        function = f" in {shown(frame.function)}" if frame.function else ""
        function = cut(function, max(0, width // 2), glyphs.dots)
        place = cut_left(view.place(frame.file, frame.line), max(8, width - cell_len(function)), glyphs.dots)
        lines.append(line(Cell(place, "code"), function))
        code = shown(line_of(frame.file, frame.line)).strip() if number == 0 else ""
        if code:
            lines.append(line("  ", Cell(cut(code, width - 2, glyphs.dots), "strong")))
    if len(frames) > STACK_FRAMES:
        lines.append(line(Cell(f"and {len(frames) - STACK_FRAMES} more", "dim")))
    return lines


def right_aligned(left: Line, right: Line, width: int) -> Line:
    """Return two pieces at the two ends of a line; the left one is cut when they do not fit."""
    room = max(0, width - width_of(right))
    return (*fitted(left, room), *right)
