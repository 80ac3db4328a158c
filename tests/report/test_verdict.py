from __future__ import annotations

import pytest

from ddpdoctor.catalogue.run_checks import CheckResult
from ddpdoctor.check import OutcomeState
from ddpdoctor.errors import ExitCode
from ddpdoctor.examination import RehearsalSection
from ddpdoctor.finding import Refuted, Severity
from ddpdoctor.report.formats import concise, full
from tests.report.examples import at, dataparallel, examination, finding, hang, result, unsharded

PASSED = CheckResult(code="DDP102", name="missing-set-epoch", looked_at_run=True)
FAILED = RehearsalSection(status="failed", reason="rank 0 raised")
STOPPED = RehearsalSection(status="stopped", reason="rank 0 waits for rank 1", ranks=2, steps=3)


def test_nothing_found_in_a_complete_examination_is_clean() -> None:
    report = examination(PASSED)
    assert (report.verdict, report.exit_code, report.complete) == ("clean", ExitCode.CLEAN, True)
    assert [outcome.state for outcome in report.outcomes] == [OutcomeState.PASSED]


@pytest.mark.parametrize(
    ("severity", "fail_on", "code"),
    [
        (Severity.ADVICE, Severity.WARNING, ExitCode.CLEAN),
        (Severity.ADVICE, Severity.ADVICE, ExitCode.FINDINGS),
        (Severity.WARNING, Severity.WARNING, ExitCode.FINDINGS),
        (Severity.WARNING, Severity.ERROR, ExitCode.CLEAN),
        (Severity.ERROR, Severity.ERROR, ExitCode.FINDINGS),
    ],
)
def test_fail_on_decides_which_findings_fail(severity: Severity, fail_on: Severity, code: ExitCode) -> None:
    report = examination(result(finding("DDP101", "x", severity, at(3))), fail_on=fail_on)
    assert report.exit_code is code
    assert report.verdict == ("findings" if code else "clean")


def test_a_failed_rehearsal_is_inconclusive_and_no_check_of_runs_has_passed() -> None:
    report = examination(PASSED, rehearsal=FAILED)
    assert (report.verdict, report.exit_code, report.complete) == ("inconclusive", ExitCode.INCONCLUSIVE, False)
    assert report.outcomes[0].state is OutcomeState.NOT_EVALUATED
    assert "rank 0 raised" in report.outcomes[0].reason


def test_a_failed_rehearsal_with_a_finding_that_fails_is_findings() -> None:
    report = examination(result(unsharded()), rehearsal=FAILED)
    assert (report.verdict, report.exit_code, report.complete) == ("findings", ExitCode.FINDINGS, False)


def test_a_failed_rehearsal_with_mere_advice_is_inconclusive() -> None:
    assert examination(result(dataparallel()), rehearsal=FAILED).exit_code is ExitCode.INCONCLUSIVE


def test_a_rehearsal_stopped_by_a_proof_is_findings() -> None:
    report = examination(result(hang()), PASSED, rehearsal=STOPPED)
    assert report.exit_code is ExitCode.FINDINGS
    assert [outcome.state for outcome in report.outcomes] == [OutcomeState.FINDINGS, OutcomeState.NOT_EVALUATED]


def test_a_rehearsal_stopped_by_a_proof_that_no_check_turned_into_a_finding_is_inconclusive() -> None:
    assert examination(PASSED, rehearsal=STOPPED).exit_code is ExitCode.INCONCLUSIVE


def test_a_check_that_failed_is_a_note_and_never_clean() -> None:
    crashed = CheckResult(code="DDP102", name="x", gap="the check failed: KeyError: 1", crashed=True)
    report = examination(crashed)
    assert report.exit_code is ExitCode.INCONCLUSIVE
    assert report.outcomes[0].state is OutcomeState.NOT_EVALUATED
    assert report.notes == ("DDP102 x: the check failed: KeyError: 1",)
    assert examination(crashed, static=True).exit_code is ExitCode.INCONCLUSIVE


def test_a_bound_that_was_hit_is_inconclusive() -> None:
    bound = CheckResult(code="DDP301", name="x", gap="too many branches in train", bound_hit=True)
    report = examination(bound, static=True)
    assert report.exit_code is ExitCode.INCONCLUSIVE
    assert report.outcomes[0].state is OutcomeState.BOUND_HIT


def test_static_asks_for_the_source_only_so_that_checks_of_runs_are_not_missed() -> None:
    report = examination(
        CheckResult(code="DDP305", name="hang", gap="needs a rehearsal", by_nature=True), PASSED, static=True
    )
    assert (report.verdict, report.exit_code, report.complete) == ("clean", ExitCode.CLEAN, True)
    assert [outcome.state for outcome in report.outcomes] == [OutcomeState.NOT_EVALUATED, OutcomeState.PASSED]


def test_what_nobody_has_said_of_the_job_leaves_a_check_out_and_the_examination_complete() -> None:
    why = "the nodes of the job are not known: state `cores` in [tool.ddpdoctor.job]"
    unstated = CheckResult(code="DDP508", name="cpu-oversubscription", gap=why, looked_at_run=True, unstated=True)
    report = examination(unstated, PASSED)
    assert (report.verdict, report.exit_code, report.complete) == ("clean", ExitCode.CLEAN, True)
    assert [(outcome.state, outcome.reason) for outcome in report.outcomes] == [
        (OutcomeState.NOT_EVALUATED, why),
        (OutcomeState.PASSED, ""),
    ]
    text = full.render(report, 120, colour=False)
    assert "1 check passed, 1 not evaluated because [tool.ddpdoctor.job] does not set them." in text
    crashed = CheckResult(code="DDP600", name="x", gap="the check failed: KeyError: 1", crashed=True)
    assert "x was not evaluated: the check failed" in concise.render(examination(unstated, crashed))


def test_a_refuted_suspicion_has_passed() -> None:
    refuted = Refuted(location=at(15), reason="the ranks draw different samples")
    report = examination(result(unsharded(), refuted=(refuted,), looked_at_run=True))
    assert report.findings == ()
    assert report.outcomes[0].state is OutcomeState.PASSED


def test_a_suspicion_that_merged_into_a_finding_of_another_code_has_not_passed() -> None:
    suspicion = finding("DDP301", "rank-divergent-collective", Severity.ERROR, at(9))
    seen = finding("DDP306", "early-exit", Severity.ERROR, at(9), basis="rehearsal")
    report = examination(result(suspicion), result(seen))
    assert [found.code for found in report.findings] == ["DDP301"]
    assert [outcome.state for outcome in report.outcomes] == [OutcomeState.FINDINGS, OutcomeState.FINDINGS]


def test_every_finding_has_a_fingerprint() -> None:
    report = examination(result(hang()), result(unsharded()))
    assert all(len(found.fingerprint) == 16 for found in report.findings)
