"""Puts the examinations of several targets together, for reports that are one document. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ddpdoctor.check import Outcome, OutcomeState
from ddpdoctor.errors import ExitCode
from ddpdoctor.examination import Examination, Verdict
from ddpdoctor.finding import Severity

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
