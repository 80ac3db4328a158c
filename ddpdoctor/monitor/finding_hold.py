"""Which findings of a watched job hold, since when, and until when: a figure near its threshold must not flicker."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ddpdoctor.diagnosis.divergence.divergence import Divergence
from ddpdoctor.diagnosis.divergence.waiting import LEFT, is_echo
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.monitor.snapshot import FindingView, StallView
from ddpdoctor.record.model import Rank, RunRecord

APPEARS_AFTER_NS = 10_000_000_000
"""A warning or advice is shown once every look for so long has found it; an error, which is a proof, at once."""
OVER_AFTER_NS = 15_000_000_000
"""A finding is over when no look has found it for so long; its end is the last look that did. A standstill is over with
the first step that all ranks make after it."""
HANG = "hang"
OF_THE_MOMENT = frozenset({HANG, "long-wait"})
"""What ranks do that make no steps: a standstill, which is shown at once, and a long wait."""
MOST_KEPT = 200
"""Findings that are over beyond this are forgotten, oldest first."""


class _Standing(msgspec.Struct):
    """One finding while it is watched."""

    finding: Finding
    since_ns: int
    seen_ns: int
    shown: bool = False


class FindingHold:
    """Takes in what each look finds; hands out what holds and what has held."""

    def __init__(self) -> None:
        self._held: dict[tuple[object, ...], _Standing] = {}
        self._over: list[FindingView] = []
        self._judged_since_ns: int | None = None
        self.is_settled = False
        """Looks have judged the speed for as long as a warning takes to be shown, and the last one found none that is
        not. Once this is so it stays: a run that was well is well until a warning is shown."""

    @property
    def pending(self) -> tuple[Finding, ...]:
        """Warnings that the last looks found, but not for long enough yet to be shown; the oldest first."""
        return tuple(
            known.finding
            for known in self._held.values()
            if not known.shown and known.finding.severity is Severity.WARNING
        )

    def take(self, findings: Iterable[Finding], now_ns: int, *, moved: bool = True, judged: bool = True) -> None:
        """Take in what the checks found at one look.

        Without a step since the last look (``moved`` is False) only errors, standstills and waits count: what is slow
        is told by steps that were made, not by waiting longer for the next. ``judged``: enough steps were made to judge
        their speed.
        """
        found = {_key(finding): finding for finding in findings if moved or _needs_no_steps(finding)}
        for key, finding in found.items():
            known = self._held.get(key)
            if known is None:
                known = self._held[key] = _Standing(finding, now_ns, now_ns)
            known.finding, known.seen_ns = finding, now_ns
            proved = finding.severity is Severity.ERROR or finding.trouble == HANG
            known.shown = known.shown or proved or now_ns - known.since_ns >= APPEARS_AFTER_NS
        for key, known in list(self._held.items()):
            if key in found or not (moved or _needs_no_steps(known.finding)):
                continue
            if not known.shown or now_ns - known.seen_ns >= OVER_AFTER_NS:
                del self._held[key]
                if known.shown:
                    self._over.append(_over(known))
        del self._over[:-MOST_KEPT]
        if judged and self._judged_since_ns is None:
            self._judged_since_ns = now_ns
        held_out = self._judged_since_ns is not None and now_ns - self._judged_since_ns >= APPEARS_AFTER_NS
        self.is_settled = self.is_settled or (held_out and not self.pending)

    def end_standstill(self, moved_at_ns: int, *, refuted: bool = False) -> None:
        """End a standstill that no look has found since ``moved_at_ns``, when all ranks had made a step.

        ``refuted``: it was a suspicion, which the job's going on shows to be wrong, so that nothing is left of it.
        """
        for key, known in list(self._held.items()):
            if known.finding.trouble == HANG and known.seen_ns < moved_at_ns:
                del self._held[key]
                if known.shown and not refuted:
                    self._over.append(_over(known))

    def views(self) -> tuple[FindingView, ...]:
        """Return what holds, the most urgent first, then what is over, newest first."""
        shown = [known for known in self._held.values() if known.shown]
        holding = [FindingView(finding=known.finding, since_ns=known.since_ns) for known in shown]
        holding.sort(key=lambda view: (view.finding.urgency, view.since_ns))
        return (*holding, *reversed(self._over))


def _needs_no_steps(finding: Finding) -> bool:
    return finding.severity is Severity.ERROR or finding.trouble in OF_THE_MOMENT


def _key(finding: Finding) -> tuple[object, ...]:
    """Return what makes two findings of two looks the same one: not the numbers in its title, which change."""
    place = finding.location
    return finding.code, finding.ranks, (place.file, place.line) if place is not None else None


def _over(known: _Standing) -> FindingView:
    return FindingView(finding=known.finding, since_ns=known.since_ns, until_ns=known.seen_ns)


# Remembers the standstill that a watched job is in, so that whatever ends the job is not taken for its cause.

FORGOTTEN_AFTER_NS = 3_000_000_000
"""A standstill that no look has found for so long is over once its culprit is elsewhere: a rank works again."""
_MOVED_NS = 500_000_000
_SENT_FROM_OUTSIDE = frozenset({"KeyboardInterrupt", "SignalException"})
"""What Ctrl-C and a launcher that is told to end raise, beside what a script's own handler of a signal does."""
_OF_THE_END = ("collectives", "death")
"""Families of errors that tell why a job ended: where a standstill was ended, that is the reason, and the only one."""
_CAUSES_OF_THE_END = frozenset({"early-exit", "killed", "exception"})


class _Stood(msgspec.Struct, frozen=True, kw_only=True):
    """A standstill as it was last seen."""

    view: StallView
    finding: Finding
    divergence: Divergence
    headway: tuple[tuple[int, int, int], ...]
    stands_since_ns: int
    """Since when the culprit has been at its place; 0 where that is not known."""
    seen_ns: int


class LastStandstill:
    """What the job was last seen to stand in, until it makes headway."""

    def __init__(self) -> None:
        self._stood: _Stood | None = None
        self.holds = False
        """It was ended, not overcome: it is the cause of the end."""

    def look(
        self,
        stall: StallView | None,
        finding: Finding | None,
        divergence: Divergence | None,
        record: RunRecord,
        *,
        told_to_end: bool,
        ended: bool,
    ) -> StallView | None:
        """Take in what a look found; the standstill to show, which is the last one where the job is being ended.

        ``ended``: the launcher has ended. What happens to the processes of a job that stands is no cause.
        """
        stood = self._stood
        ending = told_to_end or ended or any(rank.end in LEFT for rank in record.ranks)
        if stood is not None and _goes_on(stood, record, told_to_end=told_to_end):
            self._stood = stood = None
        left = stood is not None and stood.divergence.form == "absentee" and stood.finding.trouble in _CAUSES_OF_THE_END
        # Where a rank that left is the reason, and no more is known, its end is known better now.
        self.holds = stood is not None and ending and (told_to_end or not left)
        if stood is not None and self.holds:
            if not (told_to_end or ended) and stall is not None and _proves(stall, divergence, record):
                view = msgspec.structs.replace(stood.view, may_go_on=False)
                self._stood = stood = msgspec.structs.replace(stood, view=view)
            # A signal ends what was not proved; it does not prove it.
            return msgspec.structs.replace(stood.view, may_go_on=False, cut_short=stood.view.may_go_on)
        if told_to_end:
            return None  # What looks like a standstill now is how its processes end.
        if stall is not None and divergence is not None and finding is not None:
            self._stood = _Stood(
                view=stall,
                finding=finding,
                divergence=divergence,
                headway=_headway(record),
                stands_since_ns=_stands_since_ns(record, divergence.culprit),
                seen_ns=record.job.ended_ns,
            )
        elif stood is not None and divergence is None and record.job.ended_ns - stood.seen_ns > FORGOTTEN_AFTER_NS:
            since_ns = _stands_since_ns(record, stood.divergence.culprit)
            if not stood.stands_since_ns or since_ns - stood.stands_since_ns > _MOVED_NS:
                self._stood = None
        return stall

    @property
    def divergence(self) -> Divergence | None:
        """What it is, where it is the cause of the end."""
        return self._stood.divergence if self._stood is not None and self.holds else None

    @property
    def cause(self) -> Finding | None:
        """The finding of the standstill which was seen last, whether it is the cause of an end or not yet."""
        return self._stood.finding if self._stood is not None else None

    def as_cause(self, views: tuple[FindingView, ...]) -> tuple[FindingView, ...]:
        """Return the findings of an ended run with the standstill as the one reason of its end."""
        stood = self._stood
        if stood is None or not self.holds:
            return views
        cause = msgspec.structs.replace(stood.finding, severity=Severity.ERROR)
        others = [view for view in views if not is_of_the_end(view.finding) and not same_cause(view.finding, cause)]
        return (FindingView(finding=cause, since_ns=stood.view.since_ns), *others)


def _headway(record: RunRecord) -> tuple[tuple[int, int, int], ...]:
    """Return how far each rank has come: its steps, and the collectives that it has completed."""
    return tuple((heartbeat.rank, heartbeat.step, heartbeat.completed) for heartbeat in record.heartbeats)


def _stands_since_ns(record: RunRecord, number: int | None) -> int:
    """Return since when a rank has been at one place, as its newest heartbeat says; 0 for one that says nothing."""
    heartbeat = None if number is None else record.heartbeat(number)
    return 0 if heartbeat is None else heartbeat.beat_at_ns - heartbeat.unchanged_ms * 1_000_000


def _goes_on(stood: _Stood, record: RunRecord, *, told_to_end: bool) -> bool:
    """Return whether all ranks have come further, or their scripts are over, or the culprit failed by itself."""
    if told_to_end:
        return False
    before = {rank: (step, completed) for rank, step, completed in stood.headway}
    now = {rank: (step, completed) for rank, step, completed in _headway(record)}
    moved = before.keys() <= now.keys() and bool(before) and all(now[rank] != known for rank, known in before.items())
    finished = ran_to_their_ends(record)
    waiting = {turn.rank for turn in stood.divergence.turns if turn.waiting}
    failed = any(raised_its_own(rank) for rank in record.ranks if rank.rank not in waiting)
    return moved or finished or (failed and stood.divergence.form != "absentee")


def ran_to_their_ends(record: RunRecord) -> bool:
    """Return whether the scripts of all ranks are over, as far as they say it."""
    return len(record.ranks) == record.job.world_size and all(rank.main_finished for rank in record.ranks)


def is_suspicion(divergence: Divergence) -> bool:
    """Return whether no one waits for the ranks that stand: going on, or coming to their ends, refutes it."""
    standing = divergence.form == "stuck" and not any(turn.waiting or turn.kept_by for turn in divergence.turns)
    return standing or any(turn.loops for turn in divergence.turns)


def _proves(stall: StallView, divergence: Divergence | None, record: RunRecord) -> bool:
    """Return whether what the ranks do that are left proves that they stand for good; of the dead, nothing does."""
    lives = any(rank.stuck and rank.end == "running" for rank in record.ranks)
    return not stall.may_go_on and divergence is not None and (divergence.form != "stuck" or lives)


def raised_its_own(rank: Rank) -> bool:
    """Return whether a rank failed by something that no one sent it."""
    first = min(rank.exceptions, key=lambda error: error.time_ns, default=None)
    sent = first is not None and (first.by_signal > 0 or first.type in _SENT_FROM_OUTSIDE)
    return first is not None and not is_echo(rank) and not sent


def is_of_the_end(finding: Finding) -> bool:
    """Return whether a finding is about how a job ended."""
    return finding.severity is Severity.ERROR and finding.family in _OF_THE_END


def same_cause(one: Finding, other: Finding) -> bool:
    """Return whether two findings tell the same, if in other words."""
    return (one.code, one.ranks, one.location) == (other.code, other.ranks, other.location)
