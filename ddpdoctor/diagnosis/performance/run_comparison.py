"""What differs between two recorded runs of a job: noise, and change."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median

import msgspec

from ddpdoctor.check import TooLittleEvidence, Verdict
from ddpdoctor.diagnosis.performance.stragglers import enough_steps, holds
from ddpdoctor.diagnosis.performance.summarise import summarise
from ddpdoctor.diagnosis.performance.summary import RunSummary, threshold
from ddpdoctor.diagnosis.steps import RankSteps, common_rows, measured_steps
from ddpdoctor.record.model import RunRecord

# What all ranks together train, against so many times what one rank trains alone.


def lost_scaling(record: RunRecord) -> Iterator[Verdict]:
    """Yield how far the throughput of a job falls short of one rank's, times the ranks.

    Raises TooLittleEvidence where no run on one rank is known, or too few steps were measured.
    """
    one = record.job.one_rank_samples_per_s
    if not one:
        raise TooLittleEvidence(
            "no single-rank run to compare with was given: `ddpdoctor profile --nproc 1 train.py` records one, and "
            "`ddpdoctor profile --one-rank RUN` compares with it"
        )
    limit = threshold(record, "low-scaling-efficiency")

    def falls_short(summary: RunSummary) -> bool:
        efficiency = scaling_efficiency(record, summary)
        return efficiency is not None and efficiency < limit

    if not holds(record, falls_short):
        return
    summary = enough_steps(record)
    efficiency = scaling_efficiency(record, summary)
    assert summary.samples_per_s is not None
    assert efficiency is not None
    ranks = len(summary.ranks)
    yield Verdict(
        sentence=f"{ranks} ranks train {summary.samples_per_s:,.0f} samples/s, {efficiency:.0%} of {ranks} times the "
        f"{one:,.0f} samples/s of one rank",
        remedy="Check which phase of the step grew: exposed communication, waiting, or data.",
        because=(
            f"100% would be {ranks * one:,.0f} samples/s",
            None,
            {"efficiency": efficiency, "samples_per_s": summary.samples_per_s},
        ),
    )


def scaling_efficiency(record: RunRecord, summary: RunSummary) -> float | None:
    """Throughput against so many times that of one rank; None where either is not known."""
    one = record.job.one_rank_samples_per_s
    if not one or summary.samples_per_s is None:
        return None
    return summary.samples_per_s / (one * len(summary.ranks))


RESAMPLES = 1_000
BLOCKS = 12
"""Steps are drawn in blocks, a twelfth of the run long: those beside each other are slow or fast together."""
FEWEST_STEPS = 20
NINETY_FIVE = (0.025, 0.975)


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A time of the step in both runs, and the ratio of the second to the first with its 95% interval."""

    name: str
    before_ns: float
    after_ns: float
    ratio: float
    low: float
    high: float

    @property
    def is_change(self) -> bool:
        """The interval does not hold 1: it is not explained by how unsteady the runs are."""
        return not self.low <= 1.0 <= self.high


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of both runs that does not scatter; None where a run does not tell it."""

    name: str
    before: float | None
    after: float | None


class RunComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two runs side by side."""

    step: Difference
    """Mean time of a step, over the ranks."""
    phases: tuple[Difference, ...]
    """Those that take 1% of a step or more in either run."""
    amounts: tuple[Amount, ...]
    settings: tuple[tuple[str, str, str], ...]
    """What of the environment, versions and options differs: name, before, after; empty where it is not set."""
    steps: tuple[int, int]

    @property
    def other_work(self) -> tuple[str, ...]:
        """What differs so that the steps are not of the same work: ``script``, ``batch size`` and the like."""
        names = [name for name, before, after in self.settings if name in _OF_THE_WORK and before and after]
        one, other = next(((a.before, a.after) for a in self.amounts if a.name == "ranks"), (None, None))
        return (*names, *(("number of ranks",) if one != other else ()))

    def is_regression(self, allowed: float) -> bool:
        """Return whether the step became longer by more than a share ``allowed``, beyond what is noise."""
        return self.step.low > 1.0 + allowed


_OF_THE_WORK = ("script", "batch size")


class TooShort(Exception):
    """A run of which too little was measured; ``position`` is 0 for the first."""

    def __init__(self, position: int, steps: int) -> None:
        super().__init__(position, steps)
        self.position, self.steps = position, steps


def compare(before: RunRecord, after: RunRecord) -> RunComparison:
    """Compare two runs; raises TooShort where fewer than ``FEWEST_STEPS`` steps of one were measured."""
    both = [measured_steps(record) for record in (before, after)]
    places = [common_rows(ranks) for ranks in both]
    for position, rows in enumerate(places):
        if not rows or len(rows[0]) < FEWEST_STEPS:
            raise TooShort(position, len(rows[0]) if rows else 0)
    columns = [_columns(ranks, rows) for ranks, rows in zip(both, places, strict=True)]
    drawn = _draws(len(columns[0]["step"]), 1), _draws(len(columns[1]["step"]), 2)
    differences = [
        _difference(name, columns[0][name], columns[1][name], drawn) for name in columns[0] if name in columns[1]
    ]
    step = differences[0]
    least_ns = 0.01 * min(step.before_ns, step.after_ns)
    summaries = summarise(before), summarise(after)
    return RunComparison(
        step=step,
        phases=tuple(d for d in differences[1:] if max(d.before_ns, d.after_ns) >= least_ns),
        amounts=tuple(
            Amount(name=name, before=figure(summaries[0]), after=figure(summaries[1]))
            for name, figure in _AMOUNTS.items()
        ),
        settings=tuple(_settings(before, after)),
        steps=(len(columns[0]["step"]), len(columns[1]["step"])),
    )


def _columns(ranks: Sequence[RankSteps], places: Sequence[Sequence[int]]) -> dict[str, list[float]]:
    """By phase the mean over the ranks, step by step."""

    def means(value: Callable[[RankSteps, int], float]) -> list[float]:
        return [
            fmean(value(steps, at) for steps, at in zip(ranks, positions, strict=True))
            for positions in zip(*places, strict=True)
        ]

    return {
        "step": means(lambda steps, at: steps.step_ns[at]),
        "data wait": means(lambda steps, at: steps.data_wait_ns[at]),
        "forward": means(lambda steps, at: steps.forward_ns[at]),
        "backward": means(lambda steps, at: steps.backward_ns[at]),
        "explicit collectives": means(lambda steps, at: steps.explicit_ns[at]),
        "optimizer": means(lambda steps, at: steps.optimizer_ns[at]),
        "other": means(lambda steps, at: steps.other_ns[at]),
        **_exposed(ranks, places),
    }


def _exposed(ranks: Sequence[RankSteps], places: Sequence[Sequence[int]]) -> dict[str, list[float]]:
    """Exposed communication of the steps that were sampled on all ranks; a part of backward."""
    both = list(zip(ranks, places, strict=True))
    exposed = zip(*([steps.exposed_ns[at] for at in own] for steps, own in both), strict=True)
    sampled = [fmean(of_ranks) for of_ranks in exposed if min(of_ranks) >= 0]
    return {"exposed communication": sampled} if len(sampled) >= BLOCKS else {}


def _draws(length: int, seed: int) -> list[list[int]]:
    """Positions of the blocks that each resample is made of; the same numbers whenever two runs are compared."""
    dice = random.Random(seed)
    return [[dice.randrange(BLOCKS) for _ in range(BLOCKS)] for _ in range(RESAMPLES)] if length else []


def _difference(
    name: str, before: Sequence[float], after: Sequence[float], draws: tuple[list[list[int]], list[list[int]]]
) -> Difference:
    """Bootstrap the ratio of two means."""
    means = fmean(before), fmean(after)
    blocks = _blocks(before), _blocks(after)
    ratios = sorted(
        fmean(blocks[1][at] for at in later) / (fmean(blocks[0][at] for at in sooner) or 1.0)
        for sooner, later in zip(*draws, strict=True)
    )
    return Difference(
        name=name,
        before_ns=means[0],
        after_ns=means[1],
        ratio=means[1] / means[0] if means[0] else median(ratios),
        low=ratios[int(NINETY_FIVE[0] * len(ratios))],
        high=ratios[min(len(ratios) - 1, int(NINETY_FIVE[1] * len(ratios)))],
    )


def _blocks(values: Sequence[float]) -> list[float]:
    """The means of the blocks; there are at least as many values."""
    bounds = [part * len(values) // BLOCKS for part in range(BLOCKS + 1)]
    return [fmean(values[low:high]) for low, high in pairwise(bounds)]


_AMOUNTS: Mapping[str, Callable[[RunSummary], float | None]] = {
    "ranks": lambda summary: float(len(summary.ranks)),
    "samples/s": lambda summary: summary.samples_per_s,
    "bytes sent a step": lambda summary: max((rank.bytes_per_step for rank in summary.ranks), default=None),
    "collectives a step": lambda summary: max((rank.collectives_per_step for rank in summary.ranks), default=None),
    "share of communication hidden": lambda summary: summary.overlap_ratio,
}


def _settings(before: RunRecord, after: RunRecord) -> list[tuple[str, str, str]]:
    """Return what was set differently, by name."""
    told = [_settings_of(record) for record in (before, after)]
    both = [(name, *(one.get(name, "") for one in told)) for name in sorted({*told[0], *told[1]})]
    return [(name, was, now) for name, was, now in both if was != now]


_OF_THE_TOOL = frozenset({"PYTHONPATH", "MASTER_PORT"})
"""Variables that differ from run to run by our doing or the launcher's."""


def _settings_of(record: RunRecord) -> dict[str, str]:
    job = record.job
    told = {
        "torch": job.torch_version,
        "ddpdoctor": job.tool_version,
        "python": job.python,
        "backend": job.backend,
        "script": job.script,
        "arguments": " ".join(job.arguments),
        "git commit": job.commit,
        **{f"${name}": value for name, value in job.environment.items() if name not in _OF_THE_TOOL},
    }
    first = min((wrap.rank for wrap in record.wraps), default=0)
    for wrap in record.wraps:
        if wrap.rank == first:
            told |= {f"DDP {name}": str(value) for name, value in wrap.options.items()}
    for loader in record.loaders:
        if loader.rank == first:
            told |= {"loader workers": str(loader.workers), "batch size": str(loader.batch_size)}
    return told
