"""The steps of a rehearsal that can be compared between runs, whatever the machine's speed.

A *window* is what lies between two optimizer steps of one pass over a loader. How many batches a pass yields follows
from what the ranks did, never from a clock, and what a rank does between two of its steps is in the order of its own
time stamps, so windows hold the same events in every run.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import msgspec

from ddpdoctor.check import Outcome, OutcomeState
from ddpdoctor.errors import ExitCode
from ddpdoctor.examination import Examination, Verdict
from ddpdoctor.finding import Severity
from ddpdoctor.record.model import RunRecord

# Puts the examinations of several targets together, for reports that are one document. Pure.

_WORST_FIRST = (
    *(OutcomeState.FINDINGS, OutcomeState.BOUND_HIT, OutcomeState.NOT_EVALUATED, OutcomeState.PASSED),
    OutcomeState.NOTHING_TO_LOOK_AT,
)
_CODES = (ExitCode.INTERRUPTED, ExitCode.FINDINGS, ExitCode.ERROR, ExitCode.INCONCLUSIVE, ExitCode.CLEAN)
"""What decides the exit code first: an interruption, then what is certainly wrong."""


def together(examinations: Sequence[Examination]) -> Examination:
    """One examination with all findings; the parts are kept in it, and the worst of each thing is what it says."""
    if len(examinations) == 1:
        return examinations[0]
    code = min((one.exit_code for one in examinations), key=_CODES.index)
    verdicts = [one.verdict for one in examinations]
    verdict: Verdict = (
        "findings" if "findings" in verdicts else "inconclusive" if "inconclusive" in verdicts else "clean"
    )
    worst = min(examinations, key=lambda one: _CODES.index(one.exit_code))
    findings = [finding for one in examinations for finding in one.findings]
    return msgspec.structs.replace(
        worst,
        target=", ".join(one.target for one in examinations),
        verdict=verdict,
        exit_code=code,
        complete=all(one.complete for one in examinations),
        findings=tuple(sorted(findings, key=lambda finding: list(Severity).index(finding.severity))),
        outcomes=_outcomes(examinations),
        refuted=tuple(refuted for one in examinations for refuted in one.refuted),
        notes=tuple(dict.fromkeys(note for one in examinations for note in one.notes)),
        parts=tuple(examinations),
    )


def _outcomes(examinations: Sequence[Examination]) -> tuple[Outcome, ...]:
    """Of each check the worst outcome."""
    worst: dict[str, Outcome] = {}
    for one in examinations:
        for outcome in one.outcomes:
            known = worst.get(outcome.code)
            if known is None or _WORST_FIRST.index(outcome.state) < _WORST_FIRST.index(known.state):
                worst[outcome.code] = outcome
    return tuple(worst[code] for code in sorted(worst))


class Window(msgspec.Struct, frozen=True):
    """The time between two optimizer steps of a rank, in ns since the epoch."""

    training_pass: int
    """n-th pass over a loader with training in it, from 0."""
    begin_ns: int
    end_ns: int


def windows_of(record: RunRecord, rank: int) -> tuple[Window, ...]:
    """Return the windows of one rank in the order of time; none when it made fewer than two steps in a pass.

    Passes of one step each, as with a single batch an epoch, are compared as if they were one pass: then what lies
    between two epochs is a part of the step.
    """
    steps = _step_times(record, rank)
    passes = _pass_of_each(record, rank, steps)
    pairs = [
        Window(passes[index], steps[index - 1], steps[index])
        for index in range(1, len(steps))
        if passes[index] == passes[index - 1]
    ]
    if not pairs:
        pairs = [Window(0, steps[index - 1], steps[index]) for index in range(1, len(steps))]
    return tuple(pairs)


def position(windows: Sequence[Window], time_ns: int) -> int | None:
    """Return the index of the window that a moment lies in; None when it lies in none."""
    index = bisect.bisect_right([window.begin_ns for window in windows], time_ns) - 1
    return index if index >= 0 and time_ns <= windows[index].end_ns else None


def sizes(windows: Sequence[Window]) -> tuple[int, ...]:
    """Return how many windows each training pass has."""
    counts: dict[int, int] = {}
    for window in windows:
        counts[window.training_pass] = counts.get(window.training_pass, 0) + 1
    return tuple(counts.values())


def by_pass(windows: Sequence[Window], amounts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Divide one number a window into one row a pass."""
    rows: dict[int, list[int]] = {}
    for window, amount in zip(windows, amounts, strict=True):
        rows.setdefault(window.training_pass, []).append(amount)
    return tuple(map(tuple, rows.values()))


def _step_times(record: RunRecord, rank: int) -> list[int]:
    """Times of the steps of the rank's busiest optimizer: of a generator and its critic that take turns, one's."""
    times: dict[int, list[int]] = {}
    for step in record.optimizer_steps:
        if step.rank == rank:
            times.setdefault(step.optimizer, []).append(step.time_ns)
    if not times:
        return []
    busiest = min(times, key=lambda optimizer: (-len(times[optimizer]), optimizer))
    return sorted(times[busiest])


def _pass_of_each(record: RunRecord, rank: int, steps: Sequence[int]) -> list[int]:
    """Return the number of the training pass that each step belongs to."""
    forwards = sorted(
        (forward.time_ns, (forward.pass_loader, forward.pass_ordinal))
        for forward in record.forwards
        if forward.rank == rank and forward.gradients
    )
    if forwards:
        # By the batch that was trained on: loaders that fetch ahead end their pass before its last step.
        times = [time_ns for time_ns, _ in forwards]
        labels = [forwards[max(0, bisect.bisect_right(times, step) - 1)][1] for step in steps]
        numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
        return [numbers[label] for label in labels]
    ends = sorted(entry.ended_ns for entry in record.passes if entry.rank == rank and entry.backwards)
    return [bisect.bisect_left(ends, step) for step in steps]
