"""The bars of the HTML report: shares of a width, which the template draws as inline SVG."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ddpdoctor.gate.amounts import amount, share
from ddpdoctor.gate_section import Figure, GateSection
from ddpdoctor.report.escape import one_line
from ddpdoctor.report.figures import in_milliseconds

if TYPE_CHECKING:
    from ddpdoctor.diagnosis.performance.summary import Phases
    from ddpdoctor.monitor.snapshot import RankView, Snapshot

PHASES = (
    ("data_wait", "waiting for data"),
    ("forward", "forward"),
    ("backward_compute", "backward"),
    ("exposed_waiting", "waiting for the last rank"),
    ("exposed_transfer", "exposed transfer"),
    ("explicit", "explicit collectives"),
    ("optimizer", "optimizer"),
    ("other", "other"),
)
MOST_RANKS = 64


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a bar, in percent of the widest bar."""

    kind: str
    label: str
    start: float
    width: float
    value: str


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's step."""

    label: str
    total: str
    culprit: bool
    pieces: tuple[Piece, ...]


class BudgetRow(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of the budget."""

    label: str
    before: str
    now: str
    change: str
    share: str
    before_width: float
    now_width: float
    lines: tuple[str, ...]


def phase_bars(snapshot: Snapshot) -> tuple[Bar, ...]:
    """Return where the step of each rank goes; ranks without measured steps are left out, of very many the latest
    stay.
    """
    measured = [rank for rank in snapshot.ranks if rank.phases is not None]
    if len(measured) > MOST_RANKS:
        latest = sorted(measured, key=lambda rank: -(rank.late_ns or 0.0))[:MOST_RANKS]
        measured = sorted(latest, key=lambda rank: rank.rank)
    longest = max((sum(_parts(rank)) for rank in measured), default=0.0)
    return tuple(_bar(rank, longest) for rank in measured) if longest else ()


def budget_rows(section: GateSection) -> tuple[BudgetRow, ...]:
    """Return the figures of a gate, each with two bars on a scale of its own."""
    return tuple(map(_budget_row, section.figures))


def _parts(rank: RankView) -> list[float]:
    return [_part(rank.phases, kind) or 0.0 for kind, _ in PHASES]


def _part(phases: Phases | None, kind: str) -> float | None:
    value: float | None = getattr(phases, f"{kind}_ns")
    return value


def _bar(rank: RankView, longest: float) -> Bar:
    pieces, start = [], 0.0
    for kind, label in PHASES:
        value = _part(rank.phases, kind)
        width = 100 * (value or 0.0) / longest
        pieces.append(
            Piece(kind=kind, label=label, start=start, width=width, value=in_milliseconds(value) if value else "—")
        )
        start += width
    return Bar(
        label=f"rank {rank.rank}{f' on {one_line(rank.host)}' if rank.host else ''}",
        total=in_milliseconds(sum(_parts(rank))),
        culprit=rank.culprit,
        pieces=tuple(pieces),
    )


def _budget_row(figure: Figure) -> BudgetRow:
    before = figure.before or 0.0
    scale = max(before, figure.now) or 1.0
    lines = [
        f"{one_line(one.shown)}, {one_line(one.what)}: {amount(figure, one.before)} → {amount(figure, one.now)}"
        for one in figure.differences
    ]
    return BudgetRow(
        label=figure.label,
        before="—" if figure.before is None else amount(figure, before),
        now=amount(figure, figure.now),
        change=figure.change,
        share=share(figure),
        before_width=100 * before / scale,
        now_width=100 * figure.now / scale,
        lines=tuple(lines),
    )
