"""A run that was ended long after its newest step is told so."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest

from ddpdoctor.diagnosis.live_verdict import ASK_IT, stood_at_the_end, with_last_steps
from ddpdoctor.diagnosis.performance.summary import RunVerdict
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.measured import RankHeartbeat, StepTrack
from tests.diagnosis.jobs import healthy_job

SECOND_NS = 1_000_000_000


@pytest.mark.parametrize(
    ("lived_s", "usual_s", "said"),
    [
        (80, 0.1, "no step was completed in the last 80 s of the job: ranks 0 and 1 at train.py:10"),
        (8, 0.1, ""),
        (80, 5, ""),
    ],
)
def test_an_end_long_after_the_newest_step_is_told(lived_s: int, usual_s: float, said: str) -> None:
    assert stood_at_the_end(_run(lived_s), usual_s * SECOND_NS)[1] == said


def test_what_scripts_did_that_ran_to_their_ends_belongs_to_them() -> None:
    assert stood_at_the_end(_run(80, main_finished=True), SECOND_NS) == (0, "")


SLOW = RunVerdict(state="slow", code="DDP401", text="backward waits for gradients", why=("a fact",), next="send less")
STOOD = "no step was completed in the last 80 s of the job: ranks 0 and 1 at train.py:10"


@pytest.mark.parametrize(("steps", "leads"), [(50, True), (2_000, False)])
def test_of_a_slow_run_it_leads_where_it_lasted_longer_than_all_steps(steps: int, leads: bool) -> None:
    verdict = with_last_steps(SLOW, _run(80, steps=steps), 0.1 * SECOND_NS)
    if leads:
        assert (verdict.state, verdict.code, verdict.text, verdict.next) == ("unknown", "", STOOD, ASK_IT)
        assert verdict.why == ("before that, backward waits for gradients", "a fact")
    else:
        assert verdict == msgspec.structs.replace(SLOW, why=("a fact", STOOD))


def test_no_run_is_healthy_that_made_no_step_for_long_before_its_end() -> None:
    healthy = RunVerdict(state="healthy", text="well", why=("a figure",))
    verdict = with_last_steps(healthy, _run(80, steps=2_000), 0.1 * SECOND_NS)
    assert (verdict.state, verdict.text, verdict.why) == ("unknown", STOOD, ("a figure",))
    broken = RunVerdict(state="broken", text="the job ended with exit code 3")
    assert with_last_steps(broken, _run(80, steps=2_000), 0.1 * SECOND_NS) == broken


def _run(lived_s: int, *, main_finished: bool = False, steps: int = 1) -> RunRecord:
    job = healthy_job()
    site = job.site(10)
    for rank in (0, 1):
        job.leave(rank, "signalled", main_finished=main_finished)
    record = job.record()
    columns = [name for name in StepTrack.__struct_fields__ if name not in ("rank", "dropped")]
    rows = {name: array("q", [SECOND_NS]) for name in columns} | {"step": array("q", [steps])}
    track = StepTrack(rank=0, **rows)
    blank: dict[str, Any] = dict.fromkeys(RankHeartbeat.__struct_fields__, 0) | {"phase": "other", "collective": ""}
    beats = [
        RankHeartbeat(**{**blank, "rank": rank, "beat_at_ns": (1 + lived_s) * SECOND_NS, "site": site})
        for rank in (0, 1)
    ]
    return msgspec.structs.replace(record, step_tracks=(track,), heartbeats=tuple(beats))
