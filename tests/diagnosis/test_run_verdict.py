from __future__ import annotations

from typing import Any

import msgspec

from ddpdoctor.diagnosis.performance.summarise import summarise
from ddpdoctor.diagnosis.performance.summary import RunSummary
from ddpdoctor.diagnosis.performance.verdict import run_verdict
from ddpdoctor.finding import Fact, Finding, Gain, Severity
from ddpdoctor.monitor.snapshot import StallView
from tests.diagnosis.measured_job import MeasuredJob
from tests.index_of_checks import STANDS_FOR

COMPUTE = {"data_wait": 2.0, "forward": 30.0, "backward": 60.0, "optimizer": 5.0, "other": 1.0}


def summary(steps: int = 60, slower: Any = None, transfer: float = 2.0, **fields: Any) -> RunSummary:
    return summarise(MeasuredJob(2).run(steps, COMPUTE, slower, transfer=transfer, **fields).record())


def finding(code: str, severity: Severity, title: str = "it is so") -> Finding:
    facts = tuple(Fact(text=f"fact {number}", basis="run") for number in range(5))
    return Finding(
        code=code,
        name=code.lower(),
        trouble=STANDS_FOR.get(code),
        severity=severity,
        title=title,
        basis=frozenset({"run"}),
        remedy=f"mend {code}",
        evidence=facts,
    )


def test_a_run_that_computes_is_healthy_with_the_numbers() -> None:
    verdict = run_verdict(summary(), ())
    assert (verdict.state, verdict.code, verdict.next) == ("healthy", "", "")
    assert verdict.text == "95% of the step is computation, and no rank keeps the others waiting"
    assert verdict.why == (
        "of a step of 100 ms, 2% waits for data, 2% is exposed communication, 0% explicit collectives and 1% other "
        "code",
        "640 samples/s on 2 ranks",
    )


def test_a_step_that_is_mostly_code_between_the_phases_is_not_praised_for_its_computation() -> None:
    mostly_other = {"data_wait": 1.0, "forward": 2.0, "backward": 3.0, "optimizer": 1.0, "other": 90.0}
    verdict = run_verdict(summarise(MeasuredJob(2).run(60, mostly_other, None, transfer=1.0).record()), ())
    assert verdict.state == "healthy"
    assert verdict.text.endswith("92% of the step is the rest of the loop")
    assert verdict.next.startswith("Check what the loop does outside the model")


def test_a_step_that_is_mostly_waiting_is_not_healthy_though_no_check_speaks() -> None:
    verdict = run_verdict(summary(slower={1: {"forward": 900.0}}), ())
    assert (verdict.state, verdict.code) == ("slow", "")
    assert verdict.text == "rank 0 waits 90% of the step for the others, and no check knows the cause"


def test_a_step_of_which_a_third_is_communication_is_not_healthy_though_each_kind_is_below_its_threshold() -> None:
    job = MeasuredJob(2).run(60, {**COMPUTE, "other": 31.0}, transfer=30.0, explicit_ns=30_000_000)
    both = summarise(job.record())
    verdict = run_verdict(both, ())
    assert (verdict.state, verdict.code) == ("slow", "")
    assert verdict.text == "38% of the step is communication that no computation hides, and no check knows the cause"
    brings = msgspec.structs.replace(
        finding("DDP203", Severity.WARNING, "buffers are broadcast"), gain=Gain(speedup=1.2, low=1.02, high=1.5)
    )
    assert run_verdict(both, (brings,)).code == "DDP203"
    perhaps = msgspec.structs.replace(brings, gain=Gain(speedup=1.2, low=0.9, high=1.5))
    assert run_verdict(both, (perhaps,)).code == ""
    assert run_verdict(summary(), (brings,)).state == "healthy"


def test_why_a_run_waits_is_said_as_soon_as_a_check_has_found_it() -> None:
    waits = summary(slower={1: {"forward": 900.0}})
    late = finding("DDP403", Severity.WARNING, "rank 1 keeps rank 0 waiting")
    verdict = run_verdict(waits, (), pending=(late,), settled=False)
    assert (verdict.state, verdict.text) == ("slow", "so far, rank 1 keeps rank 0 waiting")
    assert (verdict.next, verdict.why[0]) == (late.remedy, "fact 0")
    early = run_verdict(waits, (), settled=False)
    assert early.text == "rank 0 waits 90% of the step for the others; it is too early to say why"


def test_advice_on_what_a_step_mostly_is_becomes_the_verdict() -> None:
    said = finding("DDP403", Severity.ADVICE, "rank 1 keeps rank 0 waiting, slower in every phase")
    small = finding("DDP404", Severity.ADVICE)
    verdict = run_verdict(summary(slower={1: {"forward": 900.0}}), (small, said))
    assert (verdict.state, verdict.code, verdict.text) == ("slow", "DDP403", said.title)
    assert run_verdict(summary(), (said,)).state == "healthy"


def test_a_rank_that_waits_for_half_of_its_step_is_not_healthy_though_the_ranks_mostly_compute() -> None:
    slower = {1: {"forward": 40.0, "backward": 40.0, "optimizer": 40.0}}
    said = finding("DDP403", Severity.ADVICE, "rank 1 keeps rank 0 waiting, slower in every phase")
    verdict = run_verdict(summary(slower=slower), (said,))
    assert (verdict.state, verdict.code) == ("slow", "DDP403")


def test_nothing_is_healthy_that_was_not_measured() -> None:
    assert run_verdict(RunSummary(), ()).text == "no training step has been measured"
    early = run_verdict(summary(15), ())
    assert early.text == "too few steps to tell: 12 of the 20 needed were measured"
    unmeasured = run_verdict(summary(sampled=1_000), ())
    assert "communication of gradients could not be measured" in unmeasured.text
    assert {early.state, unmeasured.state, run_verdict(RunSummary(), ()).state} == {"unknown"}


def test_an_error_breaks_the_run_before_anything_slows_it() -> None:
    found = (finding("DDP403", Severity.WARNING), finding("DDP706", Severity.ERROR, "rank 1 raised"))
    verdict = run_verdict(summary(), found)
    assert (verdict.state, verdict.code, verdict.text) == ("broken", "DDP706", "rank 1 raised")
    assert (verdict.why, verdict.next) == (("fact 0", "fact 1", "fact 2"), "mend DDP706")


def test_of_two_warnings_the_one_that_costs_more_decides() -> None:
    found = (finding("DDP401", Severity.WARNING), finding("DDP403", Severity.WARNING))
    assert run_verdict(summary(slower={1: {"forward": 50.0}}, transfer=20.0), found).code == "DDP403"
    assert run_verdict(summary(slower={1: {"forward": 10.0}}, transfer=60.0), found).code == "DDP401"
    assert run_verdict(summary(), found[:1]).state == "slow"


def test_the_loader_of_one_rank_is_what_keeps_the_others_waiting() -> None:
    found = (finding("DDP404", Severity.WARNING), finding("DDP403", Severity.WARNING))
    of_one, of_both = (60.0, 140.0), (140.0, 160.0)
    for waits_ms, code in ((of_one, "DDP403"), (of_both, "DDP404")):
        slower = {rank: {"data_wait": wait_ms} for rank, wait_ms in enumerate(waits_ms)}
        assert run_verdict(summary(slower=slower), found).code == code


def test_advice_and_warnings_of_other_kinds_leave_a_run_healthy() -> None:
    found = finding("DDP509", Severity.WARNING, "a variable harms"), finding("DDP403", Severity.ADVICE, "it is slow")
    verdict = run_verdict(summary(slower={1: {"forward": 10.0}}), (finding("DDP205", Severity.ADVICE), *found))
    assert (verdict.state, verdict.why[-2:]) == ("healthy", ("a variable harms", "it is slow"))
    assert verdict.next == "mend DDP509"
    assert verdict.text == "91% of the step is computation, and rank 0 waits 9% of it for the others"


def test_a_standstill_goes_before_everything() -> None:
    stall = StallView(title="rank 1 sleeps", since_ns=5, sides=(), remedy="wake it")
    verdict = run_verdict(summary(), (finding("DDP403", Severity.WARNING),), stall=stall)
    assert (verdict.state, verdict.text, verdict.next, verdict.since_ns) == ("broken", "rank 1 sleeps", "wake it", 5)
    told = run_verdict(summary(), (finding("DDP305", Severity.ERROR, "rank 1 sleeps"),), stall=stall)
    assert (told.code, told.why[0]) == ("DDP305", "fact 0")


def test_a_standstill_that_may_go_on_is_slow_and_says_when_it_is_called_hung() -> None:
    stall = StallView(title="rank 1 stands", since_ns=5, sides=(), may_go_on=True)
    verdict = run_verdict(summary(), (finding("DDP305", Severity.WARNING, "rank 1 stands"),), stall=stall)
    assert (verdict.state, verdict.code) == ("slow", "DDP305")
    assert verdict.why[:2] == ("it may recover; a rank that is idle for 60 s is reported as hung", "fact 0")


def test_a_job_that_failed_for_an_unknown_reason_is_broken() -> None:
    assert run_verdict(summary(), (), exit_code=3).text == "the job ended with exit code 3"
    assert run_verdict(RunSummary(), (), exit_code=-9).text == "the job was killed by signal 9"
    assert run_verdict(summary(), (), exit_code=0).state == "healthy"


def test_a_run_is_not_called_healthy_before_a_warning_would_have_been_shown() -> None:
    late = finding("DDP403", Severity.WARNING, "rank 1 keeps rank 0 waiting")
    verdict = run_verdict(summary(), (), pending=(finding("DDP509", Severity.WARNING), late), settled=False)
    assert (verdict.state, verdict.code) == ("unknown", "")
    assert verdict.text == "too early to tell, but so far rank 1 keeps rank 0 waiting"
    assert verdict.why == ("fact 0", "fact 1", "fact 2")
    calm = run_verdict(summary(), (), settled=False)
    assert (calm.state, calm.text) == ("unknown", "too early to tell, but nothing slow so far")
    assert run_verdict(summary(), (late,), settled=False).state == "slow"
    assert run_verdict(summary(), (), pending=(late,)).state == "healthy", "it was watched for long enough before"
