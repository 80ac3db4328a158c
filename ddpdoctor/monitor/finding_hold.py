"""Which findings of a watched job hold, since when, and until when: a figure near its threshold must not flicker."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ddpdoctor.finding import Finding, Severity
from ddpdoctor.monitor.snapshot import FindingView

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
        """Return what holds, from worst to mildest, then what is over, newest first."""
        shown = [known for known in self._held.values() if known.shown]
        holding = [FindingView(finding=known.finding, since_ns=known.since_ns) for known in shown]
        holding.sort(key=lambda view: (list(Severity).index(view.finding.severity), view.since_ns))
        return (*holding, *reversed(self._over))


def _needs_no_steps(finding: Finding) -> bool:
    return finding.severity is Severity.ERROR or finding.trouble in OF_THE_MOMENT


def _key(finding: Finding) -> tuple[object, ...]:
    """Return what makes two findings of two looks the same one: not the numbers in its title, which change."""
    place = finding.location
    return finding.code, finding.ranks, (place.file, place.line) if place is not None else None


def _over(known: _Standing) -> FindingView:
    return FindingView(finding=known.finding, since_ns=known.since_ns, until_ns=known.seen_ns)
