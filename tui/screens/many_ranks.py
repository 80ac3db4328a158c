"""The ranks of a big job by their nodes: the worst first, those that are alike in one line, and a map of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ddpdoctor.finding import grouped, rank_list
from ddpdoctor.monitor.replay import mean_of_known
from ddpdoctor.monitor.snapshot import RankView
from ddpdoctor.tui.draw.cells import EMPTY, Cell, Line, Painting, joined, line, padded, shown, stacked
from ddpdoctor.tui.draw.charts import HEAT_LEVELS, heat_of, heat_sign
from ddpdoctor.tui.draw.figures import duration
from ddpdoctor.tui.draw.table import Column, Cursor, figure_column, paint_table
from ddpdoctor.tui.screens.sections import aged_heading, heading
from ddpdoctor.tui.view import View

MANY = 64
"""Of more ranks than this no one reads a line each."""
SHOWN_ALONE = 3
"""More nodes with the same to say are one line."""


@dataclass(frozen=True, slots=True)
class Node:
    """The ranks of one machine, and what is to be said of them."""

    name: str
    ranks: tuple[RankView, ...]
    heat: tuple[int | None, ...]
    """How hot the lateness of each is drawn; None where it is not known."""

    @property
    def worst(self) -> int:
        """Which of its ranks is the worst: an index."""
        return min(range(len(self.ranks)), key=lambda index: self.badness(index))

    def badness(self, index: int) -> tuple[bool, bool, int]:
        """The worst of all ranks has the least."""
        rank, heat = self.ranks[index], self.heat[index]
        return (not rank.culprit, rank.alive or rank.state == "finished", -(heat or 0))

    def summary(self) -> str:
        """Return what is the matter, in words that are the same for nodes that are alike."""
        ranks = len(self.ranks)
        gone = sum(not rank.alive and rank.state != "finished" for rank in self.ranks)
        late = sum((heat or 0) > 0 for rank, heat in zip(self.ranks, self.heat, strict=True) if not rank.culprit)
        words = ["to blame"] if any(rank.culprit for rank in self.ranks) else []
        words += [f"{_of(gone, ranks)} gone"] if gone else []
        words += [f"{_of(late, ranks)} late"] if late else []
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node, or several that are alike."""

    nodes: tuple[Node, ...]
    summary: str

    @property
    def worst(self) -> RankView:
        """The rank that is opened with it."""
        return self.nodes[0].ranks[self.nodes[0].worst]


def is_big(view: View) -> bool:
    """Return whether the ranks are shown by their nodes: until the user filters or sorts them."""
    return len(view.snapshot.ranks) > MANY and not view.filter and not view.cursor.sort


def paint_many_ranks(view: View, width: int, height: int) -> Painting:
    """Draw a line for each node with something to say, one for those that are alike, and the map of all ranks."""
    nodes = nodes_of(view)
    rows = node_rows(nodes)
    title = f"Ranks ({len(view.snapshot.ranks)} on {len(nodes)} node{'s' if len(nodes) != 1 else ''})"
    head = aged_heading(title, view, view.snapshot.measured_at_ns, width, "/ and s show all in one table")
    wanted = len(rows) + 1
    map_lines = _map(nodes, view, width, max(4, height - wanted - 2))
    room = max(2, min(wanted, height - len(map_lines) - 2))
    cursor = Cursor(selected=view.cursor.selected, top=view.cursor.top)
    table = paint_table(rows, _columns(view), _key, cursor, width, room, view.glyphs)
    return stacked(height, [head], table, [EMPTY], map_lines)


def nodes_of(view: View) -> list[Node]:
    """Return the nodes in the order of their first rank; ranks of which no host and no node is known are of one."""

    def name_of(rank: RankView) -> str:
        return shown(rank.host) or (view.glyphs.unknown if rank.node is None else f"node {rank.node}")

    by_name = grouped(view.snapshot.ranks, name_of)
    return [Node(name, tuple(ranks), tuple(map(_heat_now, ranks))) for name, ranks in by_name.items()]


def node_rows(nodes: Sequence[Node]) -> list[NodeRow]:
    """Return a row for each node, the worst first; more than a few that are alike are one, and those that are well the
    last.

    The order is by what is drawn and not by the figures themselves, so that it does not change with every look.
    """
    alike: dict[tuple[str, int], list[Node]] = {}
    for node in nodes:
        summary = node.summary()
        hottest = max((heat or 0 for heat in node.heat), default=0) if summary else 0
        alike.setdefault((summary, hottest), []).append(node)
    rows = []
    for (summary, _), members in alike.items():
        if summary and len(members) <= SHOWN_ALONE:
            rows += [NodeRow((node,), summary) for node in members]
        else:
            rows.append(NodeRow(tuple(members), summary))
    return sorted(rows, key=lambda row: (not row.summary, row.nodes[0].badness(row.nodes[0].worst)))


def _heat_now(rank: RankView) -> int | None:
    return heat_of(_late_ns(rank), rank.median_ns)


def _late_ns(rank: RankView) -> float | None:
    return next((value for value in reversed(rank.lateness_ns) if value is not None), None)


def _of(some: int, ranks: int) -> str:
    return f"all {ranks} ranks" if some == ranks > 1 else f"{some} of {ranks} ranks"


def _key(row: NodeRow) -> str:
    return str(row.worst.rank)


def _columns(view: View) -> list[Column[NodeRow]]:
    def figure(row: NodeRow, text: str) -> Cell:
        return view.aged(text, row.worst.measured_at_ns)

    def name(row: NodeRow, width: int) -> Line:
        sign = f" {view.glyphs.culprit}" if row.worst.culprit else ""
        text = row.nodes[0].name if len(row.nodes) == 1 else f"{len(row.nodes)} nodes"
        return line(Cell(f"{text}{sign}", "bad" if row.worst.culprit else "strong"))

    def summary(row: NodeRow, width: int) -> Cell:
        return Cell(row.summary or "alike", "warning" if row.summary else "dim")

    def ranks(row: NodeRow, width: int) -> Cell:
        return Cell(rank_list(tuple(rank.rank for node in row.nodes for rank in node.ranks), 3).removeprefix("ranks "))

    def worst(row: NodeRow, width: int) -> Line:
        rank = row.worst
        text = shown(rank.state)
        if not row.summary:
            states = Counter(rank.state for node in row.nodes for rank in node.ranks)
            text = "mostly " + shown(states.most_common(1)[0][0])
            return line(Cell(text, "dim"))
        return line(Cell(f"rank {rank.rank} ", "bad" if rank.culprit else "strong"), Cell(text))

    def waiting_ns(row: NodeRow) -> float | None:
        return mean_of_known([rank.waiting_ns for node in row.nodes for rank in node.ranks])

    return [
        Column(name="node", title="node", width=11, most=18, importance=1, cell=name),
        Column(name="ranks", title="ranks", width=12, most=24, importance=4, cell=ranks),
        Column(name="told", title="", width=18, most=30, importance=2, cell=summary),
        figure_column("late", "late", lambda row: _late_ns(row.worst), duration, figure, width=7, importance=3),
        figure_column("median", "median", lambda row: row.worst.median_ns, duration, figure, width=7, importance=6),
        figure_column("waits", "waits", waiting_ns, duration, figure, width=7, importance=7),
        Column(name="worst", title="the worst now", width=20, most=46, importance=5, cell=worst),
    ]


def _map(nodes: Sequence[Node], view: View, width: int, height: int) -> list[Line]:
    """Return a sign for each rank, or for each node where there is no room for that: how late it comes."""
    longest = max((len(node.name) for node in nodes), default=0)
    label = max(9, min(20, longest))
    room = max(1, width - label - 6)
    sizes = {len(node.ranks) for node in nodes}
    by_rank = -(-sum(len(node.ranks) for node in nodes) // room) <= height - 1
    if by_rank and len(sizes) == 1 and max(sizes) <= room:
        room -= room % max(sizes)  # Each line begins with a node.
    what = "rank" if by_rank else "node"
    named = by_rank and (len(sizes) > 1 or max(sizes, default=0) > room)
    signs: list[Cell] = []
    labels: list[str] = []
    for node in nodes:
        indices = range(len(node.ranks)) if by_rank else (node.worst,)
        signs += [_sign(node, index, view) for index in indices]
        labels += [f"rank {node.ranks[index].rank}" if named else node.name for index in indices]
    lines = [heading(f"How late each {what} is", width, view.glyphs, _legend(view))]
    for first in range(0, len(signs), room):
        if len(lines) == height - 1 and first + room < len(signs):
            lines.append(line(Cell(f"  and {len(signs) - first} more {what}s", "dim")))
            break
        lines.append((Cell(f"  {padded(labels[first], label)}  ", "dim"), *joined(signs[first : first + room])))
    return lines


def _sign(node: Node, index: int, view: View) -> Cell:
    rank, heat = node.ranks[index], node.heat[index]
    if rank.culprit:
        return Cell(view.glyphs.culprit, "bad")
    if not rank.alive and rank.state != "finished":
        return Cell(view.glyphs.bad, "bad")
    return Cell(".", "faint") if heat is None else heat_sign(heat, view.glyphs)


def _legend(view: View) -> str:
    glyphs = view.glyphs
    levels = "".join(glyphs.levels[level] for level in HEAT_LEVELS)
    return f"{levels} a larger share of the step   {glyphs.culprit} to blame   {glyphs.bad} gone   . not known"
