"""What the ranks' collectives come to is found once for a record, however many checks ask for it."""

from __future__ import annotations

import pytest

from ddpdoctor.catalogue.registry import read_catalogue
from ddpdoctor.catalogue.run_checks import run_live_checks
from ddpdoctor.diagnosis import divergence_kind
from ddpdoctor.diagnosis.divergence.matching import Matcher
from tests.diagnosis.jobs import healthy_job


def test_all_checks_together_compare_the_ranks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"advance": 0, "classify": 0}

    def counting(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def counted(*arguments: object) -> object:
            calls[name] += 1
            return original(*arguments)

        monkeypatch.setattr(owner, name, counted)

    counting(Matcher, "advance")
    counting(divergence_kind, "classify")
    job = healthy_job()
    job.call(0, "all_reduce", 57)
    job.call(1, "barrier", 80)
    results = run_live_checks(read_catalogue().entries, job.record())
    assert "DDP301" in {finding.code for result in results for finding in result.from_run}
    assert calls == {"advance": 1, "classify": 1}
