"""The ranks that keep the others waiting, step after step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import pairwise
from pathlib import PurePath
from statistics import fmean, median, stdev
from typing import Literal

import msgspec

from ddpdoctor.check import TooLittleEvidence
from ddpdoctor.diagnosis.performance.summarise import MOST, summarise
from ddpdoctor.diagnosis.performance.summary import RankSummary, RunSummary, threshold
from ddpdoctor.diagnosis.steps import between, measured_steps, once_per_record
from ddpdoctor.diagnosis.sync_points import explicit_meetings, gradient_meetings
from ddpdoctor.diagnosis.wording import location_of
from ddpdoctor.finding import Location
from ddpdoctor.record.layout import CORE_WAIT, KERNEL_TIME, PAGE_FAULTS
from ddpdoctor.record.model import RunRecord, Site

# Where a rank was met while it was in a phase.

FEWEST_LOOKS = 8
SHARE_OF_LOOKS = 0.4
"""A line is named where so many of the looks met it, or what it called."""
SECOND_SHARE = 0.2
"""The next line is named beside it from so many on: a look comes when the thread gives the interpreter away, and so
meets the line behind a loop of a few milliseconds in Python more often than the loop."""


class Standing(msgspec.Struct, frozen=True):
    """The line at which some ranks were met most often in one phase."""

    location: Location
    looks: int
    of: int
    """Looks in that phase."""
    second: Location | None = None
    """The line at which, or below which, most of the other looks met them."""
    second_looks: int = 0

    @property
    def place(self) -> str:
        """The line with its function."""
        return _place(self.location)

    @property
    def others(self) -> str:
        """What the other looks met, behind a sentence on these: ``, and at train.py:35 (decode) in 7``."""
        return "" if self.second is None else f", and at {_place(self.second)} in {self.second_looks}"


def standing(record: RunRecord, ranks: Sequence[int], phase: str) -> Standing | None:
    """Return the line; None where there were too few looks, or no line stands out."""
    met = [
        (_chain(record.site(look.site)), look.looks)
        for look in record.looks
        if look.rank in ranks and look.phase == phase
    ]
    of_phase = {look.site for look in record.looks if look.phase == phase}
    elsewhere = {place for at, site in enumerate(record.sites) if at not in of_phase for place in _chain(site)}
    total = sum(looks for _, looks in met)
    line, looks = _most_met(met, elsewhere, max(FEWEST_LOOKS, SHARE_OF_LOOKS * total))
    if line is None:
        return None
    elsewhere.update(place for chain, _ in met if line in chain for place in chain)
    rest = [(chain, count) for chain, count in met if line not in chain]
    second, second_looks = _most_met(rest, elsewhere, max(1.0, SECOND_SHARE * total))
    return Standing(line, looks, total, second, second_looks)


def _most_met(
    met: Sequence[tuple[Sequence[Location], int]], elsewhere: Set[Location], least: float
) -> tuple[Location | None, int]:
    """Return the line that most looks met, and how many; where it is fewer than ``least``, the innermost line from
    which so many were called and that nothing but this phase came through.
    """
    for depth in (1, None):
        counts: Counter[Location] = Counter()
        for chain, looks in met:
            counts.update(dict.fromkeys(chain[:depth], looks))
        enough = {place for place, looks in counts.items() if looks >= least and (depth or place not in elsewhere)}
        first = Counter[Location]()
        for chain, looks in met:
            first.update(dict.fromkeys([one for one in chain[:depth] if one in enough][:1], looks))
        if first:
            place = max(first, key=lambda one: first[one])
            return place, counts[place]
    return None, 0


def _chain(site: Site) -> list[Location]:
    return [place for frame in site.frames if (place := location_of(frame)) is not None]


def _place(location: Location) -> str:
    function = f" ({location.function})" if location.function else ""
    return f"{PurePath(location.file).name}:{location.line}{function}"


# Whether what the figures of a run say held all along, or comes from one bad moment.

FEWEST_STEPS = 20
"""Steps after the warm-up that it takes to judge the speed of a run."""
QUARTERS = 4
HOLDS_IN = 3
"""Quarters of the steps in which a claim has to hold, beside the whole: one long checkpoint is in one of them."""


def enough_steps(record: RunRecord) -> RunSummary:
    """Return the figures of a run; raises TooLittleEvidence where too few steps were measured to judge by them."""
    summary = summarise(record)
    if summary.steps < FEWEST_STEPS:
        raise TooLittleEvidence(
            f"{summary.steps} steps were measured after the warm-up, and at least {FEWEST_STEPS} are needed"
        )
    return summary


def holds(record: RunRecord, claim: Callable[[RunSummary], bool]) -> bool:
    """Return whether a claim is true of the whole run and of at least three of its four quarters."""
    return claim(enough_steps(record)) and sum(map(claim, quarters(record))) >= HOLDS_IN


def typical(record: RunRecord, figure: Callable[[RunSummary], float]) -> RunSummary:
    """Return the figures of the quarter in the middle by one of them, so that a single long moment counts for nothing.

    Of the two in the middle it is the lower one: what ``holds`` is true of it.
    """
    parts = sorted(quarters(record), key=figure)
    return parts[(len(parts) - 1) // 2]


@once_per_record()
def quarters(record: RunRecord) -> tuple[RunSummary, ...]:
    """Return the figures of four parts of the run, each with the same number of sampled steps."""
    ranks = measured_steps(record)
    if not ranks:
        return ()
    first = ranks[0]
    sampled = [step for step, exposed in zip(first.step, first.exposed_ns, strict=True) if exposed >= 0]
    steps = sampled if len(sampled) >= QUARTERS else list(first.step)
    starts = [steps[part * len(steps) // QUARTERS] for part in range(1, QUARTERS)]
    bounds = [first.step[0], *starts, max(track.step[-1] for track in record.step_tracks if len(track)) + 1]
    return tuple(summarise(between(record, low, high)) for low, high in pairwise(bounds))


LEAST_NS = 1_000_000
"""A thread on a shared machine may wake up as late as that."""

COMPUTATION = "computation"
"""Forward and backward as one."""
OWN_WORK = 2.0
"""Work that others do not have makes computation slower by so many times what everything else gets slower by."""
BOTH = 0.35
"""Forward and backward are one cause where the smaller excess is so much of the larger: samples that are longer, layers
that the others do not have. Backward takes about twice as long as forward; a delay in one leaves the other alone."""
STANDARD_ERRORS = 3.0
"""By how many the mean wait has to differ from none."""
LASTING_NS = 10_000_000_000
"""What a rank loses to another program on its cores passes: over less time than this …"""
CLEAR = 3.0
"""… a rank is a straggler only from so many times the threshold on."""
MORE_FAULTS = 1.3
"""Page faults are a cause from so many times those of the others on: 5,500 a step and 2,900 made one of two equal ranks
30% late, by where glibc had put its memory."""


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that the others wait for."""

    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    """All others that meet them."""
    waiting_ns: float
    """What the others wait more per step than these ranks do, at the least; in the quarter of the run in the middle, as
    are the other figures."""
    share: float
    """The same as a share of the step."""
    phase: str
    """What makes them late: a phase as ``RankSummary.late_phase`` names it, or ``computation``, which is forward and
    backward; empty where neither explains most of it."""
    phase_ns: float
    """Mean per step of that phase on them."""
    phase_elsewhere_ns: float
    """The same on the others."""
    loss: Loss | None = None
    """What they lose to the machine, where that explains most of what the others wait."""


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """What some ranks lose more than the others beside their own work; means per step, in ns."""

    to: Literal["cores", "memory"]
    """To what else runs on their cores, or to page faults: to memory that is given back and taken again."""
    ns: float
    elsewhere_ns: float
    faults: float = 0.0
    """Page faults."""
    faults_elsewhere: float = 0.0


@once_per_record()
def straggler(record: RunRecord) -> Straggler | None:
    """Return the ranks that the others wait for, if there are such; at most half of those that wait for each other.

    Ranks are distinguished by how long they wait themselves: a straggler hardly does. Where ranks take turns in being
    late all wait alike and no one is one. Ranks that the record does not see may come later still: there, who is held
    up for longer than others wait for him is no straggler either. Raises TooLittleEvidence where too few steps were
    measured.
    """
    limit = threshold(record, "straggler")
    found = late_ranks(enough_steps(record), limit)
    if found is None:
        return None
    ranks = found[0]

    def gap_in(part: RunSummary) -> float:
        """Return what the others wait for just these ranks in a part of the run; 0 where it is for others, or none."""
        late = late_ranks(part, limit)
        return late[1] if late is not None and late[0] == ranks else 0.0

    if not holds(record, lambda part: gap_in(part) > 0) or not _beyond_chance(record, ranks):
        return None
    summary = typical(record, gap_in)
    gap_ns = gap_in(summary)
    tracks = [track for track in record.step_tracks if len(track)]
    ended_ns = max(track.ended_at_ns[-1] for track in tracks)
    is_short = ended_ns - min(track.started_at_ns[0] for track in tracks) < LASTING_NS
    if is_short and gap_ns < CLEAR * limit * _step_ns(summary):
        return None
    late = [rank for rank in summary.ranks if rank.rank in ranks]
    others = [rank for rank in summary.ranks if rank.rank not in ranks and rank.waiting_ns is not None]
    spent = [rank.phases for rank in late]
    held_ns = [(one.exposed_waiting_ns or 0.0) + (one.exposed_transfer_ns or 0.0) + one.explicit_ns for one in spent]
    if summary.unseen and max(held_ns) > gap_ns:
        return None  # One stands still in communication for longer than the others wait for it.
    loss = _loss(record, ranks, tuple(rank.rank for rank in others), gap_ns)
    if is_short and loss is not None and loss.to == "cores":
        return None
    phase = _phase(late, others, gap_ns)
    several = len({(rank.host, rank.node) for rank in record.ranks}) > 1
    if several and not phase and sum(_excess_ns(late, others).values()) < MOST * gap_ns:
        # They do not take longer: on a slow link between nodes some ranks leave a collective later than others, and
        # reach the next one as much later (seen: 30 ms at a delay of 20 ms).
        return None
    return Straggler(
        ranks=ranks,
        waiting=tuple(rank.rank for rank in others),
        waiting_ns=gap_ns,
        share=gap_ns / _step_ns(summary),
        phase=phase,
        phase_ns=fmean(own_time_ns(rank, phase) for rank in late) if phase else 0.0,
        phase_elsewhere_ns=median(own_time_ns(rank, phase) for rank in others) if phase else 0.0,
        loss=loss,
    )


def _loss(record: RunRecord, late: Sequence[int], others: Sequence[int], gap_ns: float) -> Loss | None:
    """Return what explains most of a gap without being the ranks' own work; None where nothing does.

    Longer samples take more page faults too, but hardly more time in the kernel.
    """

    def of(name: str) -> tuple[float, float]:
        means = {gauge.rank: gauge.per_step for gauge in record.gauges if gauge.name == name}
        own, theirs = ([means[rank] for rank in ranks if rank in means] for ranks in (late, others))
        return (fmean(own), median(theirs)) if own and theirs else (0.0, 0.0)

    waits, kernel, faults = of(CORE_WAIT), of(KERNEL_TIME), of(PAGE_FAULTS)
    if waits[0] - waits[1] >= MOST * gap_ns:
        return Loss(to="cores", ns=waits[0], elsewhere_ns=waits[1])
    if kernel[0] - kernel[1] >= MOST * gap_ns and faults[0] > MORE_FAULTS * faults[1]:
        return Loss(to="memory", ns=kernel[0], elsewhere_ns=kernel[1], faults=faults[0], faults_elsewhere=faults[1])
    return None


def late_ranks(summary: RunSummary, share: float) -> tuple[tuple[int, ...], float] | None:
    """Return the ranks that wait less than all others by a ``share`` of the step or more, and by how much."""
    ranks = sorted((rank for rank in summary.ranks if rank.waiting_ns is not None), key=_waiting_ns)
    if len(ranks) < 2:
        return None
    gaps = [
        (_waiting_ns(ranks[count]) - _waiting_ns(ranks[count - 1]), count) for count in range(1, len(ranks) // 2 + 1)
    ]
    gap_ns, count = max(gaps)
    if gap_ns < max(share * _step_ns(summary), LEAST_NS):
        return None
    return tuple(sorted(rank.rank for rank in ranks[:count])), gap_ns


def _beyond_chance(record: RunRecord, late: tuple[int, ...]) -> bool:
    """Return whether the others wait for these ranks by more than the steps differ among themselves.

    With two ranks that are late at random one of them is always the later one, often in most of the run.
    """
    gaps: dict[int, float] = {}
    for meeting in (*gradient_meetings(record), *explicit_meetings(record)):
        places = {rank: at for at, rank in enumerate(meeting.ranks)}
        own = [places[rank] for rank in late if rank in places]
        others = [at for rank, at in places.items() if rank not in late]
        if own and others:
            theirs, its = (
                zip(*(meeting.waiting_ns[place] for place in places), strict=True) for places in (others, own)
            )
            for step, others_ns, own_ns in zip(meeting.step, theirs, its, strict=True):
                gaps[step] = gaps.get(step, 0.0) + (fmean(others_ns) - fmean(own_ns))
    if len(gaps) < 2:
        return False
    standard_error_ns = stdev(gaps.values()) / math.sqrt(len(gaps))
    return fmean(gaps.values()) > STANDARD_ERRORS * standard_error_ns


def own_time_ns(rank: RankSummary, phase: str) -> float:
    """Mean per step of a phase, as ``Straggler.phase`` names them."""
    phases = rank.phases
    return {
        COMPUTATION: phases.forward_ns + phases.backward_compute_ns,
        "data_wait": phases.data_wait_ns,
        "forward": phases.forward_ns,
        "backward": phases.backward_compute_ns,
        "explicit": phases.explicit_ns,
        "optimizer": phases.optimizer_ns,
        "other": phases.other_ns,
    }[phase]


def _phase(late: list[RankSummary], others: list[RankSummary], gap_ns: float) -> str:
    """Return the phase that made them late, where it explains most of what the others wait."""
    excess = _excess_ns(late, others)
    if len(late) == 1 and late[0].late_phase in ("other", "explicit"):
        # What a rank does between its steps is no part of them, and explicit collectives hold waiting as well.
        return late[0].late_phase
    phase = max(excess, key=lambda name: excess[name])
    if excess[phase] >= MOST * gap_ns and not is_in_both(excess):
        return phase
    if excess["forward"] + excess["backward"] < MOST * gap_ns:
        return ""
    # Longer samples make both longer, and nothing else; what a busy core or a throttled device does is slower in all.
    computes, does_else = (_slower(late, others, phases) for phases in ((COMPUTATION,), ("optimizer", "other")))
    if computes > OWN_WORK * does_else:
        return COMPUTATION
    return phase if excess[phase] >= MOST * gap_ns else ""


def is_in_both(excess: Mapping[str, float]) -> bool:
    """Return whether what some ranks take longer, by phase, is in forward as well as in backward."""
    less, more = sorted((excess["forward"], excess["backward"]))
    return more == max(excess.values()) and less >= BOTH * more


def _slower(late: list[RankSummary], others: list[RankSummary], phases: Sequence[str]) -> float:
    """By what share of the others' time some phases take the late ranks longer; 0 where they do not."""
    own_ns, theirs_ns = (
        fmean(sum(own_time_ns(rank, phase) for phase in phases) for rank in ranks) for ranks in (late, others)
    )
    return max(0.0, own_ns / theirs_ns - 1) if theirs_ns > 0 else 0.0


def _excess_ns(late: list[RankSummary], others: list[RankSummary]) -> dict[str, float]:
    """By how much each phase takes the late ranks longer than the others."""
    return {
        phase: fmean(own_time_ns(rank, phase) for rank in late) - median(own_time_ns(rank, phase) for rank in others)
        for phase in ("data_wait", "forward", "backward", "optimizer", "other")
    }


def _waiting_ns(rank: RankSummary) -> float:
    assert rank.waiting_ns is not None
    return rank.waiting_ns


def _step_ns(summary: RunSummary) -> float:
    assert summary.phases is not None
    return summary.phases.step_ns
