"""Which rehearsals are compared with one process."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ddpdoctor.catalogue.run_checks import CheckResult
from ddpdoctor.examination import RehearsalSection
from ddpdoctor.examine.equivalence import is_compared, of_replicas
from ddpdoctor.finding import Severity
from ddpdoctor.launch.request import RehearsalRequest
from tests.report.examples import at, finding

REQUEST = RehearsalRequest(script=Path("/train.py"))
DONE = RehearsalSection(status="completed", steps=4, seconds=1.0)
FAILED = msgspec.structs.replace(DONE, status="failed")
STOPPED = msgspec.structs.replace(DONE, status="stopped")
PARTED_BY_EXCEPTION = msgspec.structs.replace(STOPPED, told_by=frozenset({"hang"}))


@pytest.mark.parametrize(
    ("section", "wanted", "is_one"),
    [
        (DONE, None, True),
        (DONE, False, False),
        (msgspec.structs.replace(DONE, seconds=1e4), None, False),
        (msgspec.structs.replace(DONE, seconds=1e4), True, True),
        (FAILED, True, True),
        (msgspec.structs.replace(FAILED, steps=1), True, False),
        (STOPPED, True, True),
        (msgspec.structs.replace(STOPPED, steps=1), True, False),
        (msgspec.structs.replace(STOPPED, told_by=frozenset({"hang"})), True, False),
        (PARTED_BY_EXCEPTION, True, True),
    ],
)
def test_what_is_compared(section: RehearsalSection, wanted: bool | None, is_one: bool) -> None:
    raised = section is PARTED_BY_EXCEPTION
    assert is_compared(REQUEST, section, wanted=wanted, thorough=False, raised=raised) is is_one


@pytest.mark.parametrize(
    ("severity", "is_told"), [(Severity.ERROR, True), (Severity.WARNING, False), (Severity.ADVICE, False)]
)
def test_replicas_whose_parameters_differ_are_not_compared_and_those_with_own_buffers_are(
    severity: Severity, is_told: bool
) -> None:
    seen = finding("DDP208", "diverged-replicas", severity, at(3), basis="rehearsal")
    assert ("DDP208 speaks" in of_replicas((CheckResult(code="DDP208", name=seen.name, from_run=(seen,)),))) is is_told
