"""Replicas that a job keeps equal by its own averages: what proves that it does, and what tells a rank's own apart."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ddpdoctor.checks.gradients import diverged_replicas
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.setup import Seeding
from ddpdoctor.record.streams.training import MadeParameters
from tests.checks.replicas import NAMES, STEP_LINE, Replicas

MADE_LINE, SEED_LINE = 12, 25


def said(record: RunRecord) -> list[Finding]:
    return [found for found in diverged_replicas.in_run(record) if isinstance(found, Finding)]


def trained(began: tuple[str, ...] = NAMES, gradients: tuple[str, ...] = (), steps: int = 3, **step: Any) -> Replicas:
    """A job without a wrap whose parameters and gradients differ where they are named."""
    job = Replicas(wrapped=False)
    job.digests("parameter_digests", 0, began)
    for _ in range(steps):
        job.backward()
        job.optimizer_step(gradients, {*began, *gradients}, **step)
    return job


def made(job: Replicas) -> tuple[MadeParameters, ...]:
    site = job.site(MADE_LINE, 90)
    names = {name: f"{name} of Agent" for name in NAMES}
    return tuple(MadeParameters(rank=rank, optimizer=0, site=site, names=names) for rank in job.ranks)


def test_parameters_that_begin_apart_are_an_error_where_they_are_made() -> None:
    job = trained()
    (finding,) = said(job.seen(made_parameters=made(job)))
    assert (finding.code, finding.severity, finding.ranks) == ("DDP208", Severity.ERROR, (0, 1))
    assert [place.line for place in finding.locations] == [MADE_LINE]
    assert finding.title.endswith("before the first optimizer step, body.weight of Agent first")
    assert finding.evidence[0].numbers == {"parameters": 2, "compared": 2, "step": 0}
    assert finding.evidence[-1].location is not None and finding.evidence[-1].location.line == STEP_LINE
    assert "dist.broadcast" in finding.remedy and "the same seed" in finding.remedy


def test_the_last_line_that_seeds_ranks_apart_is_named() -> None:
    job = trained()
    site = job.site(SEED_LINE)
    rows = [Seeding(rank=rank, value=7 + rank, library="torch", site=site) for rank in job.ranks]
    (finding,) = said(job.seen(seedings=tuple(rows)))
    told = {fact.text: fact.location for fact in finding.evidence}
    place = told["torch is seeded with 7 on rank 0, 8 on rank 1 here"]
    assert place is not None and place.line == SEED_LINE
    alike = tuple(msgspec.structs.replace(row, value=7) for row in rows)
    late = tuple(msgspec.structs.replace(row, time_ns=10**18) for row in rows)
    for given in (alike, late):
        (finding,) = said(job.seen(seedings=given))
        assert not any("seeded" in fact.text for fact in finding.evidence)


def test_rates_that_differ_part_replicas_that_began_equal() -> None:
    job = Replicas(wrapped=False)
    job.digests("parameter_digests", 0)
    for _ in range(2):
        job.backward()
        job.optimizer_step((), NAMES, rates=(0.1, 0.2))
    (finding,) = said(job.seen())
    assert "after step 1 of the optimizer" in finding.title and finding.locations[0].line == STEP_LINE
    assert any("the learning rates differ" in fact.text for fact in finding.evidence)
    assert finding.remedy == "Give the optimizer the same learning rate on every rank."


def test_what_has_gradients_of_its_own_is_a_rank_s_own() -> None:
    assert said(trained(gradients=NAMES).seen()) == []
    (finding,) = said(trained(gradients=NAMES[:1]).seen())
    assert finding.evidence[0].numbers["parameters"] == 1 and NAMES[1] in finding.title


@pytest.mark.parametrize("why", ["equal", "one step", "zeros", "a gradient apart once", "some ranks only"])
def test_nothing_is_said_without_the_proof(why: str) -> None:
    job = trained(began=() if why == "equal" else NAMES, steps=1 if why == "one step" else 3)
    rows = job.rows["gradient_digests"]
    if why == "zeros":
        rows[:] = [msgspec.structs.replace(row, digests=dict.fromkeys(NAMES, "zero")) for row in rows]
    if why == "a gradient apart once":
        rows[-1] = msgspec.structs.replace(rows[-1], digests=dict.fromkeys(NAMES, "own"))
    if why == "some ranks only":
        rows[:] = [row for row in rows if row.rank == 0]
    assert said(job.seen()) == []


def test_collectives_that_were_paired_wrongly_are_the_cause_of_all_that_follows() -> None:
    job = trained()
    job.call((0,), "all_reduce", 70, 100)
    job.call((1,), "all_reduce", 71, 200)
    assert said(job.seen()) == []
