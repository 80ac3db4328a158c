"""Compares two budgets, figure by figure and line by line. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from ddpdoctor.finding import Location
from ddpdoctor.gate.budget import METRICS, PER_STEP, Budget, Metric, Place, Share
from ddpdoctor.gate_section import Change, Difference, Figure

LABELS: dict[Metric, tuple[str, Literal["", "bytes"]]] = {
    "collectives": ("collectives a step", ""),
    "bytes_sent": ("bytes sent a step", "bytes"),
    "synchronised_backwards": ("synchronised backwards a step", ""),
    "buffer_broadcasts": ("buffer broadcasts a step", ""),
    "host_synchronisations": ("host synchronisations a step", ""),
    "batches_per_pass": ("batches of a rank a pass", ""),
    "samples_per_pass": ("samples of a rank a pass", ""),
    "model_state_bytes": ("model state", "bytes"),
}
DDP_OWN = ("gradients (", "buffers (")
"""What DDP does by itself, as ``budget.signature_text`` calls it."""
SMALLEST = 1e-9
"""A difference below this is one of the division."""

Key = tuple[str, tuple[str, str, str]]


def compared(before: Budget | None, now: Budget, root: str, allowed_growth: float) -> tuple[Figure, ...]:
    """Compare every metric; one that neither budget has is left out.

    ``allowed_growth`` is a share of the value before: 0.05 lets a figure grow by 5 %. Only steps that both budgets
    have are compared.
    """
    figures = [_figure(metric, before, now, root, allowed_growth) for metric in METRICS]
    return tuple(_put_down_to_the_model([figure for figure in figures if figure is not None]))


def _put_down_to_the_model(figures: Sequence[Figure]) -> Iterator[Figure]:
    """Of a model that changed, name the line that wraps it for what DDP sends, not the line that made DDP send it."""
    by_metric = {figure.metric: figure for figure in figures}
    model, synchronised = by_metric.get("model_state_bytes"), by_metric.get("synchronised_backwards")
    wrap = next((one for one in model.differences if one.location is not None), None) if model is not None else None
    if wrap is None or wrap.what.startswith("state of") or (synchronised and synchronised.change != "same"):
        yield from figures
        return
    for figure in figures:
        moved = [
            msgspec.structs.replace(one, what=f"{one.what} of {wrap.what}", location=wrap.location, shown=wrap.shown)
            if one.what.startswith(DDP_OWN)
            else one
            for one in figure.differences
        ]
        yield msgspec.structs.replace(figure, differences=tuple(moved))


def _figure(metric: Metric, before: Budget | None, now: Budget, root: str, allowed_growth: float) -> Figure | None:
    common = _common(before.windows, now.windows) if before is not None else now.windows
    per_step = metric in PER_STEP
    new = _amounts(now, metric, common if per_step else None)
    old = _amounts(before, metric, common if per_step else None) if before is not None else {}
    if not new and not old:
        return None
    total, total_before = sum(new.values()), sum(old.values())
    label, unit = LABELS[metric]
    differences: tuple[Difference, ...] = ()
    change: Change = "new"
    if before is not None:
        change = _change(total_before, total, allowed_growth)
        if change != "same":
            differences = tuple(_differences(metric, before, now, old, new, root))
    return Figure(
        metric=metric,
        label=label,
        unit=unit,
        before=total_before if before is not None else None,
        now=total,
        change=change,
        differences=differences,
    )


def _change(before: float, now: float, allowed_growth: float) -> Change:
    if abs(now - before) <= SMALLEST:
        return "same"
    if now < before:
        return "shrunk"
    return "within" if now <= before * (1 + allowed_growth) + SMALLEST else "grown"


def _common(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """Return how many steps of each pass both have; those of ``other`` alone when that is none."""
    common = tuple(min(pair) for pair in zip(one, other, strict=False))
    return common if any(common) else tuple(other)


def _amounts(budget: Budget, metric: Metric, windows: tuple[int, ...] | None) -> dict[Key, float]:
    """Return what each line needs: a step of ``windows``, or once."""
    found: dict[Key, float] = {}
    for share in budget.shares:
        if share.metric == metric and not _varies(share):
            amount = float(share.amounts[0][0]) if windows is None else _per_step(share.amounts, windows)
            if amount:
                key = (share.what, share.place.identity)
                found[key] = found.get(key, 0.0) + amount
    return found


def _per_step(amounts: Sequence[Sequence[int]], windows: Sequence[int]) -> float:
    """The mean of the steps. The very first is left out where there are others: DDP settles its buckets after it."""
    compared = [list(row[:size]) for row, size in zip(amounts, windows, strict=False)]
    if sum(map(len, compared)) > 1 and compared[0]:
        del compared[0][0]
    steps = [amount for row in compared for amount in row]
    return sum(steps) / len(steps) if steps else 0.0


def _varies(share: Share) -> bool:
    """Return whether the size of what a line sends depends on the data: then it differs between runs, too."""
    if share.metric != "bytes_sent" or "(" in share.what:
        return False
    sent = [amount for row in share.amounts for amount in row if amount]
    return len(set(sent)) > 2


def _differences(
    metric: Metric, before: Budget, now: Budget, old: dict[Key, float], new: dict[Key, float], root: str
) -> Iterator[Difference]:
    places = {_key(share): share.place for share in (*before.shares, *now.shares) if share.metric == metric}
    here = {_key(share) for share in now.shares if share.metric == metric}
    changed = {key: (old.get(key, 0.0), new.get(key, 0.0)) for key in {**old, **new}}
    changed = {key: pair for key, pair in changed.items() if abs(pair[1] - pair[0]) > SMALLEST}
    for key in _moved(changed):
        del changed[key]
    for gone, new_key in _edited(changed):
        changed[new_key] = (changed.pop(gone)[0], changed[new_key][1])
    for key, (was, became) in sorted(changed.items(), key=lambda item: (item[1][0] - item[1][1], item[0])):
        place = places[key]
        location = None
        if key in here and place.line:
            file = f"{root.rstrip('/')}/{place.file}"
            location = Location(file=file, line=place.line, function=place.function)
        yield Difference(what=key[0], location=location, shown=_shown(place), before=was, now=became)


def _moved(changed: dict[Key, tuple[float, float]]) -> list[Key]:
    """Lines that do the same as before in another function or file: they brought nothing."""
    gone = {key for key, (_, became) in changed.items() if not became}
    moved: list[Key] = []
    for key, (was, became) in changed.items():
        if was:
            continue
        twin = next((one for one in gone if one[0] == key[0] and one[1][2] == key[1][2]), None)
        if twin is not None and abs(changed[twin][0] - became) <= SMALLEST:
            gone.discard(twin)
            moved += [key, twin]
    return moved


def _edited(changed: dict[Key, tuple[float, float]]) -> list[tuple[Key, Key]]:
    """Lines that were written anew: of one function and doing the same, where there is one such before and one now."""
    gone: dict[tuple[str, str, str], list[Key]] = {}
    came: dict[tuple[str, str, str], list[Key]] = {}
    for key, (was, became) in changed.items():
        if not (was and became):
            (gone if was else came).setdefault((key[0], *key[1][:2]), []).append(key)
    return [(gone[kind][0], keys[0]) for kind, keys in came.items() if len(keys) == 1 == len(gone.get(kind, ()))]


def _key(share: Share) -> Key:
    return share.what, share.place.identity


def _shown(place: Place) -> str:
    return f"{place.file}:{place.line}" if place.line else "no line of the script"


def grown(figures: Iterable[Figure]) -> tuple[Figure, ...]:
    """Return the figures that grew by more than is allowed."""
    return tuple(figure for figure in figures if figure.change == "grown")
