"""The one sentence about a run: what is wrong, why, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from ddpdoctor.diagnosis.live_verdict import PATIENCE_NS
from ddpdoctor.diagnosis.performance.stragglers import FEWEST_STEPS
from ddpdoctor.diagnosis.performance.summary import DEFAULTS, Phases, RunSummary, RunVerdict, VerdictState
from ddpdoctor.diagnosis.wording import count, duration_text, milliseconds_text, rank_list
from ddpdoctor.finding import Finding, Severity

_MOSTLY = 0.5
"""A step of which so much goes with one thing is mostly that."""
_MUCH = 1 / 3
"""A step of which communication takes more is not healthy, though each kind of it stays below its own threshold."""
_FACTS = 3
_SLOW_AS_WELL = frozenset({"long-wait", "hot-barrier"})
"""Waits that make steps slow, beside the checks of the family ``speed``."""


SEE_ALL = (
    "Watch every node: start its part of the job with `ddpdoctor profile --` in front of the launch command, "
    "too; the node of rank 0 then reports all ranks."
)
"""What to do where some ranks are not seen."""
_MAY_GO_ON = f"it may recover; a rank that is idle for {duration_text(PATIENCE_NS)} is reported as hung"


class Standstill(Protocol):
    """What the verdict has to know of a standstill; ``StallView`` is one."""

    @property
    def title(self) -> str:
        """A sentence without a full stop."""

    @property
    def since_ns(self) -> int:
        """When it began."""

    @property
    def may_go_on(self) -> bool:
        """It is not proved that it is one for good."""

    @property
    def remedy(self) -> str:
        """What to do; may be empty."""


def run_verdict(
    summary: RunSummary,
    findings: Sequence[Finding],
    *,
    stall: Standstill | None = None,
    exit_code: int | None = None,
    pending: Sequence[Finding] = (),
    settled: bool = True,
    ended_in: Finding | None = None,
    cut_off: Sequence[int] = (),
) -> RunVerdict:
    """Pass the verdict on a run that continues, or that ended with ``exit_code``.

    Broken is a run with a proof that it hangs, an error, or an end with another code than 0; slow is one that stands
    but may continue, or one with a warning about its speed, the one that costs most first, or with advice on what its
    step mostly is. Healthy takes twenty measured steps, the exposed communication among them; anything else is unknown.
    So is a run that is not ``settled``: it was not watched for as long as a warning has to hold, and ``pending`` are
    the warnings that hold so far. ``ended_in`` is the wait in which someone ended the job, ``cut_off`` are ranks that
    have lost their peers on nodes out of sight.
    """
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    if stall is not None:
        decisive = next((finding for finding in findings if finding.title == stall.title), None)
        return RunVerdict(
            state="slow" if stall.may_go_on else "broken",
            code=decisive.code if decisive else "",
            text=stall.title,
            why=(*((_MAY_GO_ON,) if stall.may_go_on else ()), *(_facts(decisive) if decisive else ())),
            next=stall.remedy or (decisive.remedy if decisive else ""),
            since_ns=stall.since_ns,
        )
    if ended_in is not None:
        return _of_finding("broken" if ended_in.severity is Severity.ERROR else "slow", ended_in)
    if errors:
        return _of_finding("broken", errors[0])
    if exit_code and cut_off:
        of_all = f"{len(summary.ranks)} of {len(summary.ranks) + summary.unseen} ranks are visible here"
        return RunVerdict(
            state="broken",
            text=f"{rank_list(cut_off)} lost the connection to a rank on another node, where the cause is ({of_all})",
            next=f"Check what ended the ranks there. {SEE_ALL}",
        )
    if exit_code:
        ended = f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"
        return RunVerdict(state="broken", text=f"the job {ended}", next="Read the last lines that it printed.")
    slow = [finding for finding in findings if finding.severity is Severity.WARNING and _slows(finding)]
    if slow:
        return _of_finding("slow", max(slow, key=lambda finding: _lost_share(finding, summary)))
    remarks = [entry for entry in findings if entry.severity is Severity.WARNING or _slows(entry)]
    verdict = _without_finding(summary, remarks)
    slow = [finding for finding in pending if _slows(finding)]
    worst = max(slow, key=lambda finding: _lost_share(finding, summary), default=None)
    if verdict.state == "slow" and not verdict.code:
        return _not_known_why(verdict, worst, settled=settled)
    if verdict.state == "healthy" and not settled:
        return _too_early(verdict, worst)
    if verdict.state == "unknown" and worst is not None and summary.steps >= FEWEST_STEPS:
        return msgspec.structs.replace(_too_early(verdict, worst), next=verdict.next)
    return verdict


def _too_early(healthy: RunVerdict, worst: Finding | None) -> RunVerdict:
    """Call nothing healthy that a warning may be about to be shown of."""
    if worst is None:
        return RunVerdict(state="unknown", text="too early to tell, but nothing slow so far", why=healthy.why)
    return RunVerdict(state="unknown", text=f"too early to tell, but so far {worst.title}", why=_facts(worst))


def _not_known_why(slow: RunVerdict, worst: Finding | None, *, settled: bool) -> RunVerdict:
    """Say of a run that waits what a check has found so far; that none knows why only once they have had the time."""
    if worst is not None:
        return msgspec.structs.replace(
            slow, text=f"so far, {worst.title}", why=(*_facts(worst), *slow.why), next=worst.remedy
        )
    text = f"{slow.text}, and no check knows the cause" if settled else f"{slow.text}; it is too early to say why"
    return msgspec.structs.replace(slow, text=text)


def _without_finding(summary: RunSummary, remarks: Sequence[Finding]) -> RunVerdict:
    phases = summary.phases
    if phases is None or not summary.steps:
        return RunVerdict(state="unknown", text="no training step has been measured")
    figures = _figures(summary, phases)
    if summary.steps < FEWEST_STEPS:
        text = f"too few steps to tell: {summary.steps} of the {FEWEST_STEPS} needed were measured"
        return RunVerdict(state="unknown", text=text, why=figures)
    if summary.unseen:
        seen = f"{len(summary.ranks)} of {count(len(summary.ranks) + summary.unseen, 'rank')}"
        return RunVerdict(
            state="unknown",
            text=f"{seen} are visible here, and nothing slow was found on these",
            why=(*_waiting_unseen(phases), *figures),
            next=SEE_ALL,
        )
    if summary.exposed_share is None:
        text = "nothing slow was found, but the communication of gradients could not be measured"
        return RunVerdict(state="unknown", text=text, why=figures)
    computing = (phases.forward_ns + phases.backward_compute_ns + phases.optimizer_ns) / phases.step_ns
    why = (*figures, *(finding.title for finding in remarks[:_FACTS]))
    longest = max(summary.ranks, key=lambda rank: rank.waiting_ns or 0.0, default=None)
    waiting = (longest.waiting_ns or 0.0) / phases.step_ns if longest else 0.0
    if longest and waiting > _MOSTLY:
        # Of a rank that is slower in all that it does no cause in the script is known, and the straggler is advice.
        known = [finding for finding in remarks if _lost_share(finding, summary) > _MOSTLY]
        if known:
            return _of_finding("slow", max(known, key=lambda finding: _lost_share(finding, summary)))
        return RunVerdict(
            state="slow",
            text=f"{rank_list((longest.rank,))} waits {waiting:.0%} of the step for the others",
            why=why,
            next="Check what the ranks do in long steps; they may be late in turns.",
        )
    # What part of the step a rank is held up by communication, the waiting for others included.
    apart_ns = phases.explicit_ns if phases.exposed_transfer_ns is not None else 0.0
    held = summary.exposed_share + apart_ns / phases.step_ns
    if held > _MUCH:
        known = [finding for finding in remarks if finding.gain is not None and finding.gain.low > 1.0]
        if known:
            return _of_finding("slow", max(known, key=lambda finding: finding.gain.low if finding.gain else 1.0))
        return RunVerdict(
            state="slow",
            text=f"{held:.0%} of the step is communication that no computation hides",
            why=why,
            next=remarks[0].remedy if remarks else "Check which group and which collective takes the time.",
        )
    waits = "no rank keeps the others waiting"
    if longest and waiting >= DEFAULTS["straggler"]:
        # The computation is the mean of the ranks: together with one rank's wait it may be more than the whole.
        waits = f"{rank_list((longest.rank,))} waits {waiting:.0%} of it for the others"
    between = phases.other_ns / phases.step_ns
    text, todo = f"{computing:.0%} of the step is computation, and {waits}", ""
    if between > max(computing, _MOSTLY):
        text = f"neither data nor communication slows the job down; {between:.0%} of the step is the rest of the loop"
        todo = "Check what the loop does outside the model and the optimizer: metrics, printing, preparing batches."
    return RunVerdict(state="healthy", text=text, why=why, next=remarks[0].remedy if remarks else todo)


def _waiting_unseen(phases: Phases) -> tuple[str, ...]:
    """Return what may be waiting for ranks that no one sees here."""
    held_ns = (phases.exposed_transfer_ns or 0.0) + phases.explicit_ns
    if held_ns < DEFAULTS["straggler"] * phases.step_ns:
        return ()
    part = f"{held_ns / phases.step_ns:.0%} of the step ({milliseconds_text(held_ns)})"
    return (f"{part} they wait for other ranks or for transfer, which cannot be distinguished here",)


def _figures(summary: RunSummary, phases: Phases) -> tuple[str, ...]:
    parts = [f"{phases.data_wait_ns / phases.step_ns:.0%} waits for data"]
    if summary.exposed_share is not None:
        parts.append(f"{summary.exposed_share:.0%} is exposed communication")
    if summary.exposed_share is None or phases.exposed_transfer_ns is not None:
        parts.append(f"{phases.explicit_ns / phases.step_ns:.0%} explicit collectives")
    parts.append(f"{phases.other_ns / phases.step_ns:.0%} other code")
    told = [f"of a step of {milliseconds_text(phases.step_ns)}, {', '.join(parts[:-1])} and {parts[-1]}"]
    if summary.samples_per_s is not None:
        told.append(f"{summary.samples_per_s:,.0f} samples/s on {count(len(summary.ranks), 'rank')}")
    return tuple(told)


def _slows(finding: Finding) -> bool:
    return finding.family == "speed" or finding.trouble in _SLOW_AS_WELL


def _lost_share(finding: Finding, summary: RunSummary) -> float:
    """Return what part of the step goes with a finding, as far as the figures tell."""
    phases = summary.phases
    if phases is None:
        return 0.0
    lost_ns = {
        "exposed-communication": (phases.exposed_transfer_ns or 0.0) + phases.explicit_ns,
        "straggler": max((rank.waiting_ns or 0.0 for rank in summary.ranks), default=0.0),
        # What half of the ranks wait at least, as the check has it: the loader of a single one is a straggler's.
        "input-bound": sorted(rank.phases.data_wait_ns for rank in summary.ranks)[(len(summary.ranks) - 1) // 2]
        if summary.ranks
        else phases.data_wait_ns,
        "hot-barrier": phases.explicit_ns,
    }
    return lost_ns.get(finding.trouble or "", 0.0) / phases.step_ns


def _of_finding(state: VerdictState, finding: Finding) -> RunVerdict:
    return RunVerdict(state=state, code=finding.code, text=finding.title, why=_facts(finding), next=finding.remedy)


def _facts(finding: Finding) -> tuple[str, ...]:
    return tuple(fact.text for fact in finding.evidence[:_FACTS])
