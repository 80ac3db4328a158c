"""What stands around every page: the run and its state, the pages, the keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddpdoctor.monitor.snapshot import Snapshot
from ddpdoctor.tui.draw.cells import Cell, Line, Painting, Target, cut, fitted, line, shown, width_of
from ddpdoctor.tui.draw.figures import clock, count, span
from ddpdoctor.tui.screens.sections import right_aligned
from ddpdoctor.tui.view import View

FRAME_LINES = 3
_WIDE = 80
"""Columns from which the first line has room for two durations."""
STATE_ROLES = {"waiting": "advice", "running": "good", "stalled": "bad", "ended": "dim"}


@dataclass(frozen=True, slots=True)
class Tab:
    """A page as it is named in the second line."""

    page: str
    key: str
    title: str
    short: str


def title_line(view: View, width: int) -> Line:
    """Return which run this is, what state it is in, how old the figures are."""
    snapshot = view.snapshot
    right: list[Cell] = []
    if snapshot.source != "live":
        right += [Cell(f" {snapshot.source.upper()} ", "badge.demo"), Cell(" ")]
    if view.playback is not None and (snapshot.source == "replay" or view.playback.speed != 1):
        right.append(Cell(_playback(view), "strong"))
    if view.paused:
        right += [Cell(f" PAUSED, {span(view.behind_ns)} ago ", "badge.paused"), Cell(" ")]
    right += [Cell(snapshot.state, STATE_ROLES[snapshot.state]), Cell(f" {_how_long(snapshot, width)}  ", "")]
    if snapshot.exit_code is not None:
        right.append(Cell(f"exit code {snapshot.exit_code}  ", "bad" if snapshot.exit_code else "good"))
    age = _age(view)
    name = Cell(f" {cut(shown(snapshot.name), 40, view.glyphs.dots)}", "strong")
    left = [Cell(" ddpdoctor ", "tab.on"), name]
    if age.role != "dim" or width_of((*left, *right, age)) < width:
        right.append(age)  # Where there is little room, only figures that are old say so.
    if width_of((*left, *right)) >= width:
        left = [name]
    room = width - width_of((*left, *right)) - 4
    facts = _facts(snapshot)
    while facts and len(", ".join(facts)) > room:
        facts.pop()
    if facts:
        left.append(Cell(f"  {', '.join(facts)}", "dim"))
    return fitted(right_aligned(tuple(left), tuple(right), width), width, view.glyphs.dots)


def _facts(snapshot: Snapshot) -> list[str]:
    """Return what is known of the run, the most important first."""
    words = []
    if snapshot.world_size is not None:
        words.append("1 rank" if snapshot.world_size == 1 else f"{count(snapshot.world_size)} ranks")
    if snapshot.nodes is not None and snapshot.nodes > 1:
        words.append(f"{snapshot.nodes} nodes")
    if snapshot.steps is not None:
        words.append(f"step {count(snapshot.steps)}")
    return words + [shown(word) for word in (snapshot.backend, snapshot.device) if word]


def _how_long(snapshot: Snapshot, width: int) -> str:
    """Return for how long the run has gone on; of one that stands, for how long it stands, and both where it fits."""
    if snapshot.source == "autopsy":
        return ""
    ran = span((snapshot.ended_at_ns or snapshot.now_ns) - snapshot.started_at_ns)
    if snapshot.state == "stalled" and snapshot.stall is not None:
        stood = f"for {span(snapshot.now_ns - snapshot.stall.since_ns)}"
        return f"{stood} of {ran}" if width >= _WIDE else stood
    return ran


def _age(view: View) -> Cell:
    """Return how old the figures are, always in the same width; in words when the source itself is silent."""
    if view.silent_ns > 3_000_000_000:
        return Cell(f"no updates for {span(view.silent_ns)} ", "warning")
    if view.snapshot.source == "autopsy":
        return Cell("")
    at_ns = view.snapshot.measured_at_ns
    if at_ns is None:
        return Cell("no figures yet ", "dim")
    age_ns = max(0, view.snapshot.now_ns - at_ns)
    if view.snapshot.state == "ended":
        return Cell("final figures ", "dim")
    words = f"{age_ns / 1e9:.1f} s" if age_ns < 10e9 else span(age_ns)
    return Cell(f"figures {words:>6} old ", "dim" if view.age(at_ns)[0] == "fresh" else "warning")


def _playback(view: View) -> str:
    state = view.playback
    if state is None:
        return ""
    length = f" of {clock(state.length_ns)}" if state.length_ns is not None else ""
    speed = "held" if state.speed == 0 else f"{state.speed:g}x"
    return f"{clock(state.elapsed_ns)}{length} {speed}  "


def tab_line(view: View, tabs: Sequence[Tab], page: str, width: int) -> tuple[Line, tuple[Target, ...]]:
    """Return the pages with their keys; the one that is shown stands out, as does one with news.

    As many names are shortened as it takes, those first that save most.
    """
    saving = sorted(range(len(tabs)), key=lambda at: (len(tabs[at].short) - len(tabs[at].title), -at))
    for shortened in range(len(tabs) + 1):
        cells: list[Cell] = [Cell(" ")]
        targets = []
        at = 1
        for number, tab in enumerate(tabs):
            on, news = tab.page == page, _news(view.snapshot, tab.page)
            name = tab.short if number in saving[:shortened] else tab.title
            words = f" {tab.key} {name}{f' {news}' if news else ''} "
            role = "tab.on" if on else "bad" if tab.page == "stall" and news else "tab"
            cells.append(Cell(words, role))
            targets.append(Target(0, at, at + len(words), f"page {tab.page}"))
            at += len(words)
            if not shortened:
                cells.append(Cell(" "))
                at += 1
        if at <= width:
            break
    return tuple(cells), tuple(targets)


def _news(snapshot: Snapshot, page: str) -> str:
    if page == "findings":
        holding = sum(found.until_ns is None for found in snapshot.findings)
        return f"({holding})" if holding else ""
    if page == "stall":
        return "!" if snapshot.stall is not None else ""
    return ""


def key_line(view: View, keys: Sequence[tuple[str, str]], width: int) -> Line:
    """Return the keys that do something here, or the filter that is being typed, or what a key has just done."""
    if view.typing:
        return line(
            Cell(" filter: ", "key"),
            Cell(shown(view.filter) + "_", "strong"),
            Cell("   Enter keeps it, Esc clears it", "dim"),
        )
    right = line(Cell(f"{cut(shown(view.note), width - 2, view.glyphs.dots)} ", "strong")) if view.note else ()
    room = width - width_of(right) - 1
    kept: set[int] = set()
    # Help and quitting, the last two, stay when there is little room.
    for number in (len(keys) - 1, len(keys) - 2, *range(len(keys) - 2)):
        key, word = keys[number]
        room -= len(key) + len(word) + 3
        if room < 0:
            break
        kept.add(number)
    cells: list[Cell] = [Cell(" ")]
    for number in sorted(kept):
        cells += [Cell(keys[number][0], "key"), Cell(f" {keys[number][1]}  ", "dim")]
    return right_aligned(tuple(cells), right, width)


def framed(
    view: View, tabs: Sequence[Tab], keys: Sequence[tuple[str, str]], page: str, body: Painting, width: int
) -> Painting:
    """Return a page between its frame's lines."""
    tabbed, targets = tab_line(view, tabs, page, width)
    return Painting(
        tuple(
            fitted(cells, width, view.glyphs.dots)
            for cells in (title_line(view, width), tabbed, *body.lines, key_line(view, keys, width))
        ),
        (
            *(Target(1, one.left, one.right, one.action) for one in targets),
            *(Target(one.y + 2, one.left, one.right, one.action) for one in body.targets),
        ),
        body.top,
        body.rows,
    )
