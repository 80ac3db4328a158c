"""The page of a standstill: who waits for whom, where each side stands, how long until the timeout, what to do."""

from __future__ import annotations

from ddpdoctor.finding import rank_list
from ddpdoctor.monitor.snapshot import Snapshot, StallSide, StallView
from ddpdoctor.tui.draw.cells import EMPTY, Cell, Line, Painting, in_columns, line, paragraph, shown, stacked
from ddpdoctor.tui.draw.figures import count, span
from ddpdoctor.tui.screens.sections import heading, lasting, stack_lines
from ddpdoctor.tui.view import View

_HANG = "DDP305"
"""A rank that stands at one place: a sleep or a slow disk may reach an end."""
NARROWEST_SIDE = 44


def paint_stall(view: View, width: int, height: int) -> Painting:
    """Draw the standstill, or say that there is none."""
    stall = view.snapshot.stall
    if stall is None:
        return stacked(height, _moving(view, width))
    edge = Cell(f"{view.glyphs.cursor if not view.glyphs.plain else view.glyphs.bar_between} ", "edge.bad")
    title = shown(stall.title)
    told = [line(edge, *cells) for cells in _body(stall, view, title, width - 2)]
    sides = sorted(stall.sides, key=lambda side: not side.culprit)
    beside_each_other = _sides(sides, view, width)
    room = height - len(told) - len(beside_each_other) - 1
    return stacked(height, told, [EMPTY], beside_each_other, _ranks(view, width, room))


def _ranks(view: View, width: int, room: int) -> list[Line]:
    """Return what each rank does now, the culprits first, where there is room."""
    ranks = sorted(view.snapshot.ranks, key=lambda rank: (not rank.culprit, rank.rank))
    if room < 3 or not ranks:
        return []
    digits = max(len(str(rank.rank)) for rank in ranks)
    lines = [heading("The ranks now", width, view.glyphs)]
    for rank in ranks[: room - 1]:
        known = rank.alive and rank.state_since_ns is not None
        since = f" for {span(view.snapshot.now_ns - (rank.state_since_ns or 0))}" if known else ""
        place = "" if rank.where is None else f"  {view.place(rank.where.file, rank.where.line)}"
        sign = view.glyphs.culprit if rank.culprit else " "
        role = "bad" if rank.culprit else ""
        lines.append(
            line(
                Cell(f"  rank {rank.rank:>{digits}} {sign} ", role or "dim"),
                Cell(f"{shown(rank.state)}{since}", role),
                Cell("" if rank.step is None else f", step {count(rank.step)}", "dim"),
                Cell(place, "code"),
            )
        )
    if len(ranks) > room - 1:
        lines[-1] = line(Cell(f"  and {len(ranks) - room + 2} more", "dim"))
    return lines


def _body(stall: StallView, view: View, title: str, width: int) -> list[Line]:
    ended = view.snapshot.state == "ended"
    badge = Cell(" ENDED " if ended else " STALLED ", "badge.bad")
    lines = paragraph(title[:1].upper() + title[1:], width - 10, "strong", badge)
    lines = [(cells[0], Cell(" "), *cells[1:]) for cells in lines]
    lines += _ended(view) if ended else _standing(stall, view)
    if stall.remedy:
        lines += paragraph(stall.remedy, width - 1, "strong", Cell("do       ", "bad"), most=4)
    waiting = tuple(rank for side in stall.sides if not side.culprit for rank in side.ranks)
    culprits = tuple(rank for side in stall.sides if side.culprit for rank in side.ranks)
    if waiting and culprits and (view.snapshot.source != "autopsy" or not ended):
        lines.append(
            line(
                Cell("who      ", "dim"),
                Cell(rank_list(waiting), "strong"),
                Cell(f" {view.glyphs.rule * 2}> {'waits' if len(waiting) == 1 else 'wait'} for ", "dim"),
                Cell(rank_list(culprits), "bad"),
            )
        )
    return lines


def _ended(view: View) -> list[Line]:
    code = view.snapshot.exit_code
    return [line(Cell("the job  ", "dim"), Cell("has ended" + (f" with exit code {code}" if code else ""), "bad"))]


def _standing(stall: StallView, view: View) -> list[Line]:
    """Return for how long it stands, and how long until the process group gives up."""
    now_ns = view.snapshot.now_ns
    limit: Cell | str = Cell(f"{view.glyphs.unknown} not known", "dim")
    if stall.timeout_at_ns is not None:
        left_ns = stall.timeout_at_ns - now_ns
        limit = f"the process group times out in {span(left_ns)}" if left_ns > 0 else "the timeout has passed"
    told = [lasting(view.snapshot, stall.since_ns)]
    if stall.may_go_on:
        told.append("and may recover" if told[0] else "it may recover")
    elif view.snapshot.verdict.code != _HANG:
        told.append("and it will not recover" if told[0] else "it will not recover")
    stands = ", ".join(filter(None, told))
    lines = [line(Cell("stands   ", "dim"), Cell(stands, "bad"))] if stands else []
    return [*lines, line(Cell("timeout  ", "dim"), limit)]


def _sides(sides: list[StallSide], view: View, width: int) -> list[Line]:
    """Return the places at which ranks stand, beside each other, the culprit's first."""
    columns = max(1, min(len(sides), (width + 3) // (NARROWEST_SIDE + 3)))
    side_width = (width - 3 * (columns - 1)) // columns
    return in_columns([_side(side, view, side_width) for side in sides], columns, side_width, 3)


def _side(side: StallSide, view: View, width: int) -> list[Line]:
    name = rank_list(side.ranks)
    head = heading(
        name[:1].upper() + name[1:],
        width,
        view.glyphs,
        f"{view.glyphs.culprit} the culprit" if side.culprit else "",
        "bad",
    )
    return [
        head,
        *paragraph(side.text, width - 2, "bad" if side.culprit else "", Cell("  "), most=3),
        *(line("  ", *cells) for cells in stack_lines(side.stack, width - 2, view)),
    ]


def _moving(view: View, width: int) -> list[Line]:
    snapshot = view.snapshot
    return [
        heading("Stall", width, view.glyphs),
        line(Cell(f"  {view.glyphs.good} ", "good"), Cell(_no_stall(snapshot), "")),
        EMPTY,
        *paragraph(
            "This page opens when ranks wait for each other and cannot continue: it shows who waits for whom, their "
            "stacks side by side, and what to do.",
            width - 4,
            "dim",
            Cell("  "),
        ),
    ]


def _no_stall(snapshot: Snapshot) -> str:
    if snapshot.state == "waiting":
        return "no rank has trained a step yet"
    return "the job has ended" if snapshot.state == "ended" else "no stall: the ranks are running"
