"""Ranks of a live run that have drawn more batches than the others for as many steps, while the job goes on."""

from __future__ import annotations

from typing import Any

import pytest

from ddpdoctor.checks.collectives import silent_desync
from ddpdoctor.checks.collectives.divergences_run import LASTING_STEPS
from ddpdoctor.finding import Finding, Frame, Severity
from ddpdoctor.record.model import Forward, Site, Wrap
from ddpdoctor.record.streams.training import Loader, Pass
from tests.diagnosis.measured_job import MeasuredJob

SITES = (Site((Frame("/job/train.py", 12, "main"),)),)
STEPS = 60


def said(job: MeasuredJob, loaders: int = 1, **of_pass: Any) -> list[Finding]:
    known = {"ordinal": 0, "true_length": 500, "looped": True, **of_pass}
    every = [(rank, loader) for rank in job.ranks for loader in range(loaders)]
    record = job.record(
        sites=SITES,
        wraps=tuple(Wrap(rank=rank, wrap=0, ranks=tuple(job.ranks)) for rank in job.ranks),
        loaders=tuple(Loader(rank=rank, loader=loader, site=0) for rank, loader in every),
        passes=tuple(Pass(rank=rank, loader=loader, site=0, **known) for rank, loader in every),
        forwards=tuple(
            Forward(rank=rank, wrap=0, site=0, step=1, gradients=True, training=True, pass_loader=loader)
            for rank, loader in every
        ),
    )
    return [found for found in silent_desync.in_run(record) if isinstance(found, Finding)]


def job_with(**drawn: int) -> MeasuredJob:
    """A job in which ranks, given as ``r1_s20``, draw other numbers of batches for a step."""
    job = MeasuredJob(3).run(STEPS, {"forward": 1.0})
    for place, batches in drawn.items():
        rank, step = place[1:].split("_s")
        job.rows[int(rank)]["batches"][int(step) - 1] = batches
    return job


def test_a_rank_that_passes_over_a_batch_is_told_while_the_job_goes_on() -> None:
    (finding,) = said(job_with(r1_s20=2))
    assert (finding.code, finding.severity, finding.ranks) == ("DDP312", Severity.WARNING, (1,))
    assert finding.title == (
        "rank 1 drew 2 batches for step 20, the others 1: from there on it trains on different batches than the "
        "others, and it will be a step short at the end unless they skip as many"
    )
    assert [place.line for place in finding.locations] == [12]


@pytest.mark.parametrize(
    "drawn",
    [
        {},
        {"r0_s20": 2, "r1_s20": 2, "r2_s20": 2},
        {"r0_s20": 2, "r1_s26": 2, "r2_s30": 2},
        {f"r1_s{STEPS - LASTING_STEPS + 1}": 2},
        {f"r1_s{step}": 2 for step in range(1, STEPS + 1)} | {f"r0_s{step}": 3 for step in range(1, STEPS + 1)},
        {"r0_s20": 2, "r1_s25": 3},
    ],
    ids=["the same", "together", "in turns", "just now", "no usual number", "two ranks"],
)
def test_draws_that_prove_nothing_are_left_alone(drawn: dict[str, int]) -> None:
    assert said(job_with(**drawn)) == []


@pytest.mark.parametrize("of_pass", [{"looped": False}, {"joined": True}, {"true_length": None}], ids=str)
def test_loops_that_may_draw_as_they_like_are_left_alone(of_pass: dict[str, Any]) -> None:
    assert said(job_with(r1_s20=2), **of_pass) == []


def test_of_two_loaders_nobody_knows_which_was_drawn_from() -> None:
    assert said(job_with(r1_s20=2), loaders=2) == []
