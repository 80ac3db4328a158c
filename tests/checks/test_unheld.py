"""Parameters that no optimizer holds, though one was built for their model: what is said of them."""

from __future__ import annotations

from typing import Any

from ddpdoctor.checks.gradients import optimizer_misplaced
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.record.streams.training import UnheldParameters
from tests.checks.replicas import WRAP_LINE, Replicas

OPTIMIZER_LINE = 25


def said(job: Replicas, *ranks: int, **fields: Any) -> list[Finding]:
    values = {
        "wrap": 0,
        "site": job.site(OPTIMIZER_LINE),
        "optimizer_type": "Adam",
        "parameters": ("head.bias", "head.weight"),
        "count": 2,
        "elements": 510,
        "steps": 2,
    }
    rows = tuple(UnheldParameters(rank=rank, **{**values, **fields}) for rank in ranks)
    found = optimizer_misplaced.in_run(job.seen(unheld_parameters=rows))
    return [finding for finding in found if isinstance(finding, Finding)]


def test_what_came_after_the_optimizer_is_an_error_at_the_optimizer() -> None:
    (finding,) = said(Replicas(), 0, 1, strangers=2)
    assert (finding.code, finding.severity, finding.ranks) == ("DDP206", Severity.ERROR, ())
    assert [place.line for place in finding.locations] == [OPTIMIZER_LINE, WRAP_LINE]
    assert finding.title == (
        "2 parameters of Net are in no optimizer and never trained: this Adam was built before they were there: "
        "head.bias, head.weight"
    )
    assert [fact.text for fact in finding.evidence] == [
        "they have gradients before each of 2 steps (510 elements), and no step changes them",
        "the Adam holds 2 parameters that no wrapped module has and that never get a gradient",
        "the Adam is built here",
        "the model is wrapped here",
    ]


def test_one_parameter_on_one_rank_is_told_in_the_singular() -> None:
    (finding,) = said(Replicas(), 1, parameters=("scale",), count=1, elements=1)
    assert finding.ranks == (1,)
    assert finding.title == (
        "1 parameter of Net is in no optimizer and never trained: this Adam was built before it was there: scale"
    )
    assert len(finding.evidence) == 3


def test_a_wrap_that_was_not_seen_is_not_judged() -> None:
    assert said(Replicas(), 0, wrap=3) == []
