"""What the ranks of a run do while they make no steps: validating, saving, waiting for one of them; where, how long."""

from __future__ import annotations

from collections.abc import Sequence

from ddpdoctor.diagnosis.performance.summary import StepTimes
from ddpdoctor.diagnosis.wording import duration_text, place, rank_list
from ddpdoctor.monitor.snapshot import RankView

OVERDUE_AFTER_NS = 3_000_000_000
"""Ranks whose next step takes longer do something else …"""
OVERDUE_STEPS = 4
"""… unless their usual steps (95 of 100) take more than a part of that."""
MOST_KINDS = 4
MOST_RANKS = 8


def overdue_ns(ranks: Sequence[RankView], times: StepTimes | None, now_ns: int) -> int | None:
    """Return how long ago a living rank made its newest step; None while the next is not overdue, or none was made
    yet.
    """
    made_at_ns = [rank.stepped_at_ns for rank in ranks if rank.alive and rank.stepped_at_ns is not None]
    since_ns = now_ns - min(made_at_ns, default=now_ns)
    patience_ns = max(OVERDUE_AFTER_NS, OVERDUE_STEPS * (times.p95_ns if times is not None else 0))
    return since_ns if since_ns > patience_ns else None


def meanwhile(ranks: Sequence[RankView], now_ns: int) -> str:
    """Return what the ranks do, those that do the same together: ``ranks 0-7 evaluating at train.py:88 for 40 s``."""
    alike: dict[str, list[RankView]] = {}
    for rank in ranks:
        at = f" at {place(rank.where)}" if rank.where is not None else ""
        alike.setdefault(rank.state + at, []).append(rank)
    told = [f"{_named(group)} {doing}{_for(group, now_ns)}" for doing, group in list(alike.items())[:MOST_KINDS]]
    others = len(ranks) - sum(len(group) for group in list(alike.values())[:MOST_KINDS])
    return ", ".join([*told, *([f"and {others} others"] if others else [])])


def _named(ranks: Sequence[RankView]) -> str:
    return rank_list(rank.rank for rank in ranks) if len(ranks) <= MOST_RANKS else f"{len(ranks)} ranks"


def _for(ranks: Sequence[RankView], now_ns: int) -> str:
    """Return for how long the one that began last has done it."""
    since_ns = [rank.state_since_ns for rank in ranks if rank.alive]
    known = [at_ns for at_ns in since_ns if at_ns is not None]
    return f" for {duration_text(max(0, now_ns - max(known)))}" if known and len(known) == len(since_ns) else ""
