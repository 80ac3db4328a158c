"""A run that was ended long after its newest step is told so."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest

from ddpdoctor.diagnosis.live.last_steps import stood_at_the_end
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.measured import Pulse, StepTrack
from tests.diagnosis.jobs import healthy_job

SECOND_NS = 1_000_000_000


@pytest.mark.parametrize(
    ("lived_s", "usual_s", "said"),
    [
        (80, 0.1, "no step was made in the last 80 s of the job: ranks 0 and 1 at train.py:10"),
        (8, 0.1, ""),
        (80, 5, ""),
    ],
)
def test_an_end_long_after_the_newest_step_is_told(lived_s: int, usual_s: float, said: str) -> None:
    assert stood_at_the_end(_run(lived_s), usual_s * SECOND_NS) == said


def test_what_scripts_did_that_ran_to_their_ends_belongs_to_them() -> None:
    assert stood_at_the_end(_run(80, main_finished=True), SECOND_NS) == ""


def _run(lived_s: int, *, main_finished: bool = False) -> RunRecord:
    job = healthy_job()
    site = job.site(10)
    for rank in (0, 1):
        job.leave(rank, "signalled", main_finished=main_finished)
    record = job.record()
    columns = [name for name in StepTrack.__struct_fields__ if name not in ("rank", "dropped")]
    track = StepTrack(rank=0, dropped=0, **{name: array("q", [SECOND_NS]) for name in columns})
    blank: dict[str, Any] = dict.fromkeys(Pulse.__struct_fields__, 0) | {"phase": "other", "collective": ""}
    pulses = [
        Pulse(**{**blank, "rank": rank, "beat_at_ns": (1 + lived_s) * SECOND_NS, "site": site}) for rank in (0, 1)
    ]
    return msgspec.structs.replace(record, step_tracks=(track,), pulses=tuple(pulses))
