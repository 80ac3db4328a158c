"""Whether several ranks compute the gradient that one process would on the same samples, and how it differs if not.

Of a parameter there are the gradient G that the optimizer of each rank gets, the gradient J of one process on the
samples of all ranks, the gradient h_r that the backward of rank r leaves before any reduction, and the gradient g_r of
one process on the samples of rank r alone. DDP is right where G = J. Otherwise the others say why: h_r against g_r is
the loss, G against the mean of the h_r is the reduction, and J as a combination of the g_r is how the loss weighs
samples. Whatever these do not explain is no alarm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from ddpdoctor.diagnosis.training.first_steps import Runs, Step, unclipped
from ddpdoctor.diagnosis.training.vectors import Vector, distance, dot, fit, minus, norm, shares
from ddpdoctor.equivalence_section import EquivalenceSection

TOLERANCE = 2e-3
"""Of the norm of a parameter's gradient. Sums of float32 in another order differ by 1e-6 to 1e-5 in public models; a
weight that is off by the smallest part of a batch that matters (a token in 500) differs by more."""
REDUCED_TOLERANCE = 3e-2
"""The same where something is computed, or sent, in 16 bits: 8 bits of mantissa leave 4e-3 in each factor."""
NEGLIGIBLE = 0.2
"""Gradients whose mean square is below this share of the tolerance of the whole one's are rounding: those of a bias
before a norm, or of the keys of an attention, are zero by design."""
SAME_FACTOR = 0.02
"""Factors that differ by no more are one."""
NOISE_TIMES = 4.0
"""So many times what a change in the last place of the parameters makes of a gradient is rounding: the sums of one
process are other ones in each layer."""
CHAOTIC = 0.1
"""Of the norm: where that changes more, nothing can be told of the gradients."""
FACTORS_KEPT = 16
EXPLAINED = 3.0
"""So many tolerances may be left of a gradient that others are to explain."""
APART = "the ranks begin with different parameters"
"""Then no process can be given those of all of them."""


class _Row(msgspec.Struct, frozen=True):
    """A parameter in a step, in every way in which its gradient is known."""

    step: int
    wrap: int
    name: str
    ranks: tuple[Vector | None, ...]
    one: Vector | None
    others: tuple[Vector | None, ...]
    local: tuple[Vector | None, ...]
    alone: tuple[Vector | None, ...]
    piece: int
    stride: int
    noise: float
    """The norm of what rounding makes of it, where that was measured."""

    @property
    def here(self) -> Vector | None:
        return self.ranks[0]


LEAST_UNEVEN = 0.05
"""Counts of a term that differ by less weigh the samples of a rank no more than chance does."""


class _Fit(msgspec.Struct, frozen=True):
    """Gradients as sums of those of one process on the samples of each rank."""

    weights: list[float]
    """Of one process on the samples of all, …"""
    rest: float
    """… the share of it that is left, …"""
    of_ranks: list[float]
    """… and the same of the ranks."""
    rest_of_ranks: float


def compare(runs: Runs) -> EquivalenceSection:
    """Compare what the ranks' optimizers got with what one process gets; inconclusive where that cannot be told."""
    steps = min(len(runs.one), *map(len, runs.ranks))
    if not steps:
        return unclear("no optimizer step was made in both")
    if problem := _other_steps(runs, steps):
        return unclear(problem)
    clipped, runs = runs, unclipped(runs, steps)
    rows = [row for number in range(steps) for row in _rows(runs, number)]
    if not all(math.isfinite(sum(v)) for row in rows for v in (*row.ranks, row.one) if v is not None):
        return unclear("a gradient holds numbers that are not finite")
    facts = runs.ranks[0][0].facts
    reduced = any(one.facts.get("reduced_precision") for one in (runs.ranks[0][0], runs.one[0]))
    tolerance = REDUCED_TOLERANCE if reduced else TOLERANCE
    scale = _scale(rows)
    if not scale:
        if any(any(vector or ()) for row in rows for vector in row.ranks):
            return unclear("in one process every gradient is zero, and on the ranks it is not")
        if any(step.share < 1 for step in (*runs.one[:steps], *runs.ranks[0][:steps])):
            return unclear("every gradient that was kept is zero")
        names = {(row.wrap, row.name) for row in rows}
        of_all: dict[str, Any] = {"ranks": len(runs.ranks), "steps": steps, "parameters": len(names)}
        return EquivalenceSection(status="equal", equal=len(names), zero=True, **of_all)
    judge = _Judge(runs, rows, tolerance, scale * tolerance * NEGLIGIBLE, steps)
    section = judge.verdict(by_rank=bool(facts.get("plain_norms")) and not facts.get("synced_norms"))
    return msgspec.structs.replace(section, unclipped=runs is not clipped)


def needs_controls(section: EquivalenceSection) -> bool:
    """Return whether more runs may say why the gradients differ."""
    return section.kind == "unexplained"


def unclear(reason: str, **fields: Any) -> EquivalenceSection:
    """Return that it cannot be told, and why."""
    return EquivalenceSection(status="inconclusive", reason=reason, **fields)


def _other_steps(runs: Runs, count: int) -> str:
    if any(steps[0].state != runs.ranks[0][0].state for steps in runs.ranks):
        return APART
    for steps in (runs.one, *runs.others, *runs.alone):
        if any(mine.state != first.state for mine, first in zip(steps, runs.ranks[0], strict=False)):
            return "one process could not be given the parameters of the ranks"
    for steps in (*runs.ranks, *runs.others, *runs.again, *runs.alone):
        for mine, one in zip(steps, runs.one[:count], strict=False):
            if (mine.optimizer, mine.ordinal) != (one.optimizer, one.ordinal):
                return "one process steps its optimizers in another order"
            if len(mine.gradients) != len(one.gradients):
                return "one process has other parameters"
            pairs = zip(mine.gradients, one.gradients, strict=True)
            if any(a.values and b.values and len(a.values) != len(b.values) for a, b in pairs):
                return "one process has parameters of other shapes"
    return ""


def _rows(runs: Runs, number: int) -> Iterator[_Row]:
    def of(steps: tuple[Step, ...], index: int) -> Vector | None:
        return steps[number].gradients[index].values if number < len(steps) else None

    for index, gradient in enumerate(runs.ranks[0][number].gradients):
        again = of(runs.again[0], index) if runs.again else None
        yield _Row(
            noise=norm(minus(gradient.values, again)) if again is not None else 0.0,
            step=number,
            piece=gradient.piece,
            stride=gradient.stride,
            wrap=gradient.wrap,
            name=gradient.name,
            ranks=tuple(of(steps, index) for steps in runs.ranks),
            one=of(runs.one, index),
            others=tuple(of(steps, index) for steps in runs.others),
            local=tuple(steps[number].gradients[index].local for steps in runs.ranks),
            alone=tuple(of(steps, index) for steps in runs.alone),
        )


class _Judge:
    """The comparison while it is made."""

    def __init__(self, runs: Runs, rows: list[_Row], tolerance: float, floor: float, steps: int) -> None:
        self._runs = runs
        self._rows = rows
        self._tolerance = tolerance
        self._floor = floor
        """Root of the mean square below which a gradient is rounding."""
        self._steps = steps
        self._world = len(runs.ranks)
        self._differ = [row for row in rows if self._is_apart(row.here, row.one, row.noise)]

    def verdict(self, *, by_rank: bool) -> EquivalenceSection:
        names = {(row.wrap, row.name) for row in self._rows}
        apart = [row for row in self._rows if any(self._is_apart(row.here, other) for other in row.ranks[1:])]
        within = max((distance(row.here, row.one) for row in self._rows if not self._is_rounding(row)), default=0.0)
        common: dict[str, Any] = {
            "ranks": self._world,
            "steps": self._steps,
            "parameters": len(names),
            "equal": len(names - {(row.wrap, row.name) for row in (*self._differ, *apart)}),
            "within": within,
            "statistics_by_rank": by_rank,
            "against": self._runs.against,
            "norms": (self._runs.ranks[0][0].norm, self._runs.one[0].norm),
            "factors": tuple(self._factors()),
            "share": self._runs.ranks[0][0].share,
            "beside": self._beside(),
        }
        alike = not self._differ and not apart
        noisy = any(row.noise > CHAOTIC * norm(row.here) and not self._is_rounding(row) for row in self._rows)
        # What rounding would make of gradients does not matter where they are nearly the same.
        if alike and within <= (REDUCED_TOLERANCE if noisy else CHAOTIC):
            counted = tuple(("divisor", file, line) for _, file, line in self._runs.ranks[0][0].counted)
            return EquivalenceSection(status="equal", places=counted, **common)
        if noisy or alike:
            return unclear("the ranks themselves get other gradients when they are run again", **common)
        found = self._explanation(apart)
        return EquivalenceSection(**{**common, **found})

    def _explanation(self, apart: list[_Row]) -> dict[str, Any]:
        """Return the fields that say how the gradients differ, or why that is not told."""
        if problem := self._random():
            return {"status": "inconclusive", "reason": problem}
        if any(self._is_apart(row.one, other) for row in self._rows for other in row.others):
            return _open("the ranks of the other launch step with different gradients")
        if apart:
            if all(row.wrap == -1 for row in apart):
                return _open("parameters that no DDP model holds have other gradients on each rank")
            return self._says("unsynchronised", apart)
        if (clip := self._clip()) is not None:
            return self._says("clipped", self._differ, places=(clip,))
        if own := self._own_factors():
            places = [("", *place) for place in self._runs.ranks[0][0].rescaled]
            places += [("", *place) for steps in self._runs.ranks[1:] for place in steps[0].rescaled]
            return self._says("own-factors", self._differ, by_rank=own, places=tuple(dict.fromkeys(places)))
        factors = [self._factor(row) for row in self._rows]
        if all(factor is not None for factor in factors):
            return self._scaled([factor for factor in factors if factor is not None])
        if self._runs.against and self._runs.again:
            return self._says("other", self._differ)
        if self._runs.in_turn:
            return self._by_parts()
        if beside := self._beside():
            # Parameters are set to those of the ranks after each step, and these are not.
            held = ", ".join(beside[:3])
            return _open(f"the gradients are the same in the first step only, after which {held} has other values")
        if not self._runs.alone:
            return _open("the gradients have another direction", kind="unexplained")
        return self._combined()

    def _factors(self) -> Iterator[tuple[str, float]]:
        """Yield the parameters that differ in the first step, and how long their gradients are along the other's."""
        rows = [row for row in self._differ if row.step == 0]
        for row in sorted(rows, key=lambda row: -distance(row.here, row.one))[:FACTORS_KEPT]:
            square = dot(row.one, row.one)
            yield row.name, float(f"{dot(row.here, row.one) / square if square else 0.0:.4g}")

    def _beside(self) -> tuple[str, ...]:
        """Return the buffers and states of the optimizer that differ after a first step of equal gradients."""
        mine, one = self._runs.ranks[0][0].beside, self._runs.one[0].beside
        if any(row.step == 0 for row in self._differ):
            return ()
        both = [what for what, values in mine.items() if len(one.get(what, ())) == len(values)]
        # Of a parameter without any effect, as a bias before a norm, the optimizer keeps rounding.
        both = [what for what in both if not (self._is_small(mine[what]) and self._is_small(one[what]))]
        return tuple(what for what in both if distance(mine[what], one[what]) > self._tolerance)

    def _own_factors(self) -> tuple[float, ...]:
        """Return by which factor what each rank holds of every gradient differs, in the first step in which the ranks'
        are not the same; none where the pieces of a rank have other directions, or a gradient is in no pieces.
        """
        for step in range(self._steps):
            rows = [row for row in self._rows if row.step == step and not self._is_rounding(row)]
            if not rows or any(not row.piece or row.here is None or row.one is None for row in rows):
                return ()
            factors = []
            for rank in range(self._world):
                here = [_of_rank(row.here, row, rank) for row in rows]
                one = [_of_rank(row.one, row, rank) for row in rows]
                square = sum(map(dot, one, one))
                factor = sum(map(dot, here, one)) / square if square else 0.0
                rest = math.sqrt(sum(norm(minus(a, b, factor)) ** 2 for a, b in zip(here, one, strict=True)))
                if factor <= 0 or rest > EXPLAINED * self._tolerance * math.sqrt(sum(map(dot, here, here))):
                    return ()
                factors.append(float(f"{factor:.4g}"))
            if any(not self._is_same(one, factors[0]) for one in factors):
                return tuple(factors)
        return ()

    @property
    def _kind_if_open(self) -> str:
        return "" if self._runs.again or self._runs.in_turn else "unexplained"

    def _says(self, kind: str, rows: list[_Row], **fields: Any) -> dict[str, Any]:
        return {"status": "differs", "kind": kind, "modules": self._modules(rows), **fields}

    def _scaled(self, factors: list[float]) -> dict[str, Any]:
        """Gradients that only differ in their lengths."""
        known = [(row, factor) for row, factor in zip(self._rows, factors, strict=True) if not math.isnan(factor)]
        off = [factor for _, factor in known if abs(factor - 1) > SAME_FACTOR]
        if not off:
            if self._kind_if_open:
                return _open("the gradients differ by little more than rounding", kind=self._kind_if_open)
            # The sentence says by how much: the same direction, and less than what a factor or a weight makes.
            return {"status": "equal", "equal": len({(row.wrap, row.name) for row in self._rows})}
        factor = off[len(off) // 2]
        if any(not self._is_same(one, factor) for one in off):
            if self._runs.against and self._runs.again:
                return self._says("other", self._differ)
            return _open("the gradients differ by several factors", kind=self._kind_if_open)
        if not (self._runs.alone or self._runs.in_turn or self._runs.against):
            return _open(f"the gradients differ by a factor of {factor:.2f}", kind="unexplained")
        rows = [row for row, one in known if abs(one - 1) > SAME_FACTOR]
        whole = len(off) == len(known)
        if whole and self._runs.alone and self._adds_up():
            return _open(
                "the loss adds up its samples, or divides their sum by a fixed number: DDP's mean over the ranks is "
                f"1/{self._world} of that, and which is meant cannot be told"
            )
        if self._runs.against or not factor or self._is_of_world(factor):
            kind = "scaled" if whole else "cut" if self._runs.cuts and factor < 1 else "part"
            places = self._runs.cuts if kind == "cut" else self._scaled_at(factor)
            return self._says(kind, [] if whole else rows, factor=round(factor, 4), places=places)
        return _open(f"the gradients differ by a factor of {factor:.2f}, which no number of ranks explains")

    def _by_parts(self) -> dict[str, Any]:
        """Gradients of batches that one process cannot be given at once: it may be told how they are added up."""
        if not self._runs.alone:
            reason = "the gradients of passes that one process makes one after the other have another direction"
            return _open(reason, kind="" if self._runs.has_loaders else "unexplained")
        if problem := self._not_given():
            return _open(problem)
        fits = [] if any(step.unmatched_draws for steps in self._runs.alone for step in steps) else self._fits()
        if not fits or any(fit.rest_of_ranks > EXPLAINED * self._tolerance or min(fit.of_ranks) < 0 for fit in fits):
            return _open("one process cannot be given the batches of all ranks at once")
        return self._sum_of_ranks(fits) or _open("one process cannot be given the batches of all ranks at once")

    def _sum_of_ranks(self, fits: Sequence[_Fit]) -> dict[str, Any]:
        """Return that what the ranks have alone is multiplied or divided by their number; nothing where it is not."""
        factor = sum(fits[0].of_ranks)
        if not all(self._is_same(sum(fit.of_ranks), factor) for fit in fits) or not self._is_of_world(factor):
            return {}
        whole = {"equal": 0, "within": round(abs(1 - factor) / max(1, factor), 4), "factors": ()}
        return self._says("scaled", [], factor=round(factor, 4), places=self._scaled_at(factor), **whole)

    def _is_of_world(self, factor: float) -> bool:
        return any(self._is_same(factor, float(self._world) ** power) for power in (-2, -1, 1, 2))

    def _combined(self) -> dict[str, Any]:
        """Gradients of another direction."""
        whole = math.sqrt(sum(dot(row.here, row.here) for row in self._rows))
        noise = math.sqrt(sum(row.noise**2 for row in self._rows)) / whole if whole else 0.0
        most = max(EXPLAINED * self._tolerance, NOISE_TIMES * noise)
        constants = self._constants()
        fits = self._fits()
        if constants is not None:
            return self._says("rank-constant", self._differ, places=(constants,))
        if problem := self._not_given():
            return _open(problem)
        wrong = self._wrong_ranks()
        if any(fit.rest > most for fit in fits):
            # What is gathered for a metric leaves the gradient of a rank as it is alone.
            if self._runs.cuts and len(wrong) == self._world:
                return self._says("cut", self._differ, places=self._runs.cuts)
            if all(fit.rest_of_ranks <= most for fit in fits) and (found := self._sum_of_ranks(fits) or self._term()):
                return found
            return _open(
                "the gradient of one process is no sum of what it has for the samples of each rank: the loss may "
                "compare samples of a batch with each other, or divide several terms by counts of their own"
            )
        if any(min(fit.weights) < 0.05 * max(fit.weights) for fit in fits):
            return _open("one process was not given the samples of every rank")
        if all(fit.rest_of_ranks <= most for fit in fits):
            if len(wrong) == self._world:
                return _open("on every rank the loss weighs samples otherwise than in one process")
            for step, fit in enumerate(fits):
                if not all(map(self._is_same, shares(fit.weights), shares(fit.of_ranks))):
                    due = tuple(round(share, 4) for share in shares(fit.weights))
                    weights = tuple(round(share, 4) for share in shares(fit.of_ranks))
                    places = tuple(("own-count", *place) for place in self._own_counts())
                    counts = self._counts(step, due)
                    return self._says("weighted", [], weights=weights, due=due, counts=counts, places=places)
        for ranks in (wrong, self._wrong_ranks(by_direction=True)):
            if 0 < len(ranks) < self._world:
                return self._says("one-rank", self._differ, at=tuple(ranks))
        return _open("another direction, which nothing that was recorded explains")

    # Evidence.

    def _random(self) -> str:
        """Return why chance may be the reason; empty where it is not."""
        ones = self._runs.one[: self._steps]
        if any(step.unmatched_draws for step in ones):
            return "a step draws random numbers that one process cannot be given"
        if self._runs.has_loaders:
            if any(a.random != b.random for steps in self._runs.ranks for a, b in zip(steps, ones, strict=False)):
                return "a step draws random numbers from Python or NumPy for each sample"
            # The generators were seeded alike with each batch, so what they gave is the same in all processes.
            return ""
        if any(step.random_moved for steps in self._runs.ranks for step in steps[: self._steps]):
            return "a step draws random numbers from Python or NumPy"
        return ""

    def _not_given(self) -> str:
        """Return in place of which data one process used others; empty where it only lacks some, or only has more: then
        a term of the loss is one rank's, which is the script's doing.
        """
        for rank, (steps, alone) in enumerate(zip(self._runs.ranks, self._runs.alone, strict=True)):
            for mine, one in zip(steps[: self._steps], alone, strict=False):
                lacks = [where for digest, where in mine.entered.items() if digest not in one.entered]
                if lacks and one.entered.keys() - mine.entered.keys():
                    file, line = lacks[0]
                    at = f" at {file.rpartition('/')[2]}:{line}" if file else ""
                    given = "by no loader and by no generator of torch, and one process has other data there"
                    return f"what enters the loss on rank {rank}{at} comes {given}"
        return ""

    def _clip(self) -> tuple[str, str, int] | None:
        """Return the call that cut gradients by norms that are the ranks' own."""
        for steps in zip(*(steps[: self._steps] for steps in self._runs.ranks), strict=False):
            for calls in zip(*(step.clips for step in steps), strict=False):
                norms = [float(call["norm"]) for call in calls]
                if max(norms) - min(norms) > 0.01 * max(norms) and max(norms) > float(calls[0]["most"]):
                    return str(calls[0]["name"]), str(calls[0]["file"]), int(calls[0]["line"])
        return None

    def _constants(self) -> tuple[str, str, int] | None:
        """Return the loss with weights of classes that are the ranks' own."""
        for steps in zip(*(steps[: self._steps] for steps in self._runs.ranks), strict=False):
            for losses in zip(*(step.losses for step in steps), strict=False):
                if len({loss[2] for loss in losses}) > 1:
                    return "loss", str(losses[0][0]), int(losses[0][1])
        return None

    def _scaled_at(self, factor: float) -> tuple[tuple[str, str, int], ...]:
        """Return the one line whose number makes this factor: it is another one in one process, or a count of all ranks
        that is named with the line where it was added up.
        """
        mine, one = self._runs.ranks[0][0], self._runs.one[0]
        alone = [steps[0].scalings for steps in self._runs.alone]
        places: dict[tuple[str, str, int], tuple[tuple[str, str, int], ...]] = {}
        for place, number in mine.scalings.items():
            kind, file, line = place
            if not number or (kind, number) not in mine.scaled_back:
                continue
            other = 0.0 if self._runs.in_turn else one.scalings.get(place, 0.0)
            parts = [scalings.get(place, 0.0) for scalings in alone]
            if other and self._is_same(number / other if kind == "mul" else other / number, factor):
                places[place] = (("loss", file, line),)
            elif parts and all(parts) and self._is_same(factor, 1 / self._world):
                whole = sum(parts) if kind == "div" else 1 / sum(1 / part for part in parts)
                if self._is_same(number, whole):
                    counted = [("count", *mine.counted[place])] if place in mine.counted else []
                    places[place] = (("divisor", file, line), *counted)
        return next(iter(places.values())) if len(places) == 1 else ()

    def _term(self) -> dict[str, Any]:
        """Return the one term of the loss that is divided by a count of each rank's own, where the ranks' counts differ
        and add up to that of one process; nothing where there is none, or several.
        """
        found = self._own_counts()
        if len(found) != 1:
            return {}
        ((file, line), counts), equal = next(iter(found.items())), round(1 / self._world, 4)
        due = tuple(round(count / sum(counts), 4) for count in counts)
        numbers = tuple(map(int, counts)) if all(count == int(count) for count in counts) else ()
        shares = {"weights": (equal,) * self._world, "due": due, "counts": numbers}
        return self._says("weighted", self._differ, places=(("term", file, line),), **shares)

    def _own_counts(self) -> dict[tuple[str, int], tuple[float, ...]]:
        """Return the lines that divide by a count of each rank's own, where these differ and add up to that of one
        process, with the counts.
        """
        found: dict[tuple[str, int], tuple[float, ...]] = {}
        for step in range(self._steps):
            mine, one = self._runs.ranks[0][step], self._runs.one[step]
            for place, number in mine.scalings.items():
                counts = tuple(steps[step].scalings.get(place, 0.0) for steps in self._runs.ranks)
                uneven = min(counts) > 0 and max(counts) > (1 + LEAST_UNEVEN) * min(counts)
                whole = self._is_same(sum(counts), one.scalings.get(place, 0.0))
                if place[0] == "div" and ("div", number) in mine.scaled_back and uneven and whole:
                    found.setdefault(place[1:], counts)
        return found

    def _counts(self, step: int, shares: tuple[float, ...]) -> tuple[int, ...]:
        """Return how many targets each rank counts, where its share in one process is theirs."""
        counts = [sum(int(loss[3] or 0) for loss in steps[step].losses) for steps in self._runs.ranks]
        whole = sum(counts)
        if not whole or len(set(counts)) == 1:
            return ()
        fits = all(abs(count / whole - share) < 0.01 for count, share in zip(counts, shares, strict=True))
        return tuple(counts) if fits else ()

    def _wrong_ranks(self, *, by_direction: bool = False) -> list[int]:
        """Return the ranks whose backward leaves another gradient than one process does on their samples; by direction
        where the loss is divided by a count of all ranks, which is another one for the samples of one.
        """
        wrong = []
        for rank in range(self._world):
            for step in range(self._steps):
                rows = [row for row in self._rows if row.step == step]
                whole = sum(dot(row.alone[rank], row.alone[rank]) for row in rows)
                times = sum(dot(row.local[rank], row.alone[rank]) for row in rows) / whole if whole else 0.0
                times = times if by_direction and times > 0 else 1.0
                pairs = [(row.local[rank], minus(None, row.alone[rank], -times), row.noise) for row in rows]
                if any(self._is_apart(mine, one, noise) for mine, one, noise in pairs):
                    wrong.append(rank)
                    break
        return wrong

    def _fits(self) -> list[_Fit]:
        """Return, for each step, what the gradients of one process on the samples of each rank add up to."""
        fits = []
        for step in range(self._steps):
            rows = [row for row in self._rows if row.step == step]
            alone = [[row.alone[rank] for row in rows] for rank in range(self._world)]
            weights, rest = fit([row.one for row in rows], alone)
            of_ranks, rest_of_ranks = fit([row.here for row in rows], alone)
            fits.append(_Fit(weights, rest, of_ranks, rest_of_ranks))
        return fits

    def _adds_up(self) -> bool:
        """Return whether one process adds up what the ranks' processes get, and DDP averages it."""
        return all(
            max(fit.rest, fit.rest_of_ranks) <= EXPLAINED * self._tolerance
            and all(self._is_same(weight, 1.0) for weight in fit.weights)
            and all(self._is_same(weight, 1.0 / self._world) for weight in fit.of_ranks)
            for fit in self._fits()
        )

    def _factor(self, row: _Row) -> float | None:
        """Return the factor of a row; NaN where both are rounding, None where its direction is another one."""
        if self._is_small(row.one):
            return math.nan if self._is_small(row.here) else None
        factor = dot(row.here, row.one) / dot(row.one, row.one)
        rest = norm(minus(row.here, row.one, factor))
        if rest <= max(EXPLAINED * self._tolerance * max(norm(row.here), norm(row.one)), NOISE_TIMES * row.noise):
            return factor
        return None

    def _modules(self, rows: list[_Row]) -> tuple[str, ...]:
        """Return the modules with these parameters, as coarsely as they are told from the others; none for all."""
        chosen = {(row.wrap, row.name) for row in rows}
        everything = {(row.wrap, row.name) for row in self._rows}
        if chosen == everything:
            return ()
        wraps = {wrap for wrap, _ in everything}
        found = []
        for wrap in sorted({wrap for wrap, _ in chosen}):
            names = {name for number, name in everything if number == wrap}
            mine = {name for number, name in chosen if number == wrap}
            prefix = f"model {wrap}" if len(wraps) > 1 and wrap != -1 else ""
            if mine == names and prefix:
                found.append(prefix)
                continue
            for top in dict.fromkeys(name.partition(".")[0] for name in sorted(mine)):
                found.append(f"{prefix}: {top}" if prefix else top)
        return tuple(found)

    # Numbers.

    def _is_small(self, vector: Vector | None) -> bool:
        return vector is None or norm(vector) <= self._floor * math.sqrt(len(vector))

    def _is_rounding(self, row: _Row) -> bool:
        return self._is_small(row.here) and self._is_small(row.one)

    def _is_apart(self, a: Vector | None, b: Vector | None, noise: float = 0.0) -> bool:
        difference = norm(minus(a, b))
        most = max(norm(a), norm(b))
        length = len(a or b or ())
        return difference > max(self._tolerance * most, self._floor * math.sqrt(length), NOISE_TIMES * noise)

    def _is_same(self, a: float, b: float) -> bool:
        return abs(a - b) <= max(SAME_FACTOR, self._tolerance) * max(abs(a), abs(b))


def _open(reason: str, kind: str = "") -> dict[str, Any]:
    return {"status": "inconclusive", "reason": reason, "kind": kind}


def _scale(rows: list[_Row]) -> float:
    """Return the root of the mean square of all gradients."""
    vectors = [row.one if row.one is not None else row.here for row in rows]
    squares = [(dot(vector, vector), len(vector)) for vector in vectors if vector is not None]
    elements = sum(length for _, length in squares)
    return math.sqrt(sum(square for square, _ in squares) / elements) if elements else 0.0


def _of_rank(vector: Vector | None, row: _Row, rank: int) -> Vector:
    """Return what a rank holds of a gradient, of which one in some elements was kept."""
    begin, end = (-(-number * row.piece // row.stride) for number in (rank, rank + 1))
    return (vector or ())[begin:end]
