"""Budgets by hand: a line a share."""

from __future__ import annotations

from ddpdoctor.gate.budget import Budget, Metric, Place, Share


def place(line: int = 10, *, file: str = "train.py", function: str = "main", code: str = "") -> Place:
    return Place(file, function, code or f"line{line}()", line)


def share(metric: Metric, *amounts: tuple[int, ...], what: str = "all_reduce", at: Place | None = None) -> Share:
    return Share(metric=metric, what=what, place=at or place(), amounts=amounts)


def budget(*shares: Share, windows: tuple[int, ...] = (3, 3)) -> Budget:
    return Budget(windows=windows, shares=shares)
