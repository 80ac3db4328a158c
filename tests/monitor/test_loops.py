"""When a rank that others wait for is suspected of an endless loop."""

from __future__ import annotations

import os
from array import array

import msgspec
import pytest

from ddpdoctor.diagnosis.live_verdict import LastingWait
from ddpdoctor.finding import Frame
from ddpdoctor.monitor.processes import liveness
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.measured import StepTrack
from tests.diagnosis.jobs import SCRIPT, healthy_job

SECOND_NS = 1_000_000_000
WAIT = LastingWait(late=0, waiting=(1,), since_ns=0, timeout_ns=0, doing="busy", place=Frame(SCRIPT, 88, "evaluate"))


class Job:
    """Rank 0 works in one function while rank 1 waits, step after step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0
        self.step = 1
        self._watch = liveness.LoopDetector()
        monkeypatch.setattr(liveness, "_wanted_core_ns", lambda pid: self.now_s * SECOND_NS)

    def work(self, seconds: int, wait: LastingWait | None = WAIT) -> int | None:
        """Let time pass; after how many seconds a loop was suspected."""
        for second in range(1, seconds + 1):
            self.now_s += 1
            if self._watch.look(wait, self._record(), self.now_s * SECOND_NS) is not None:
                return second
        return None

    def _record(self) -> RunRecord:
        record = healthy_job().record()
        ranks = tuple(msgspec.structs.replace(rank, pid=os.getpid()) for rank in record.ranks)
        empty = StepTrack(rank=0, **{name: array("q") for name in _columns()})
        steps = msgspec.structs.replace(
            empty, step=array("q", [self.step]), started_at_ns=array("q", [0]), ended_at_ns=array("q", [1])
        )
        return msgspec.structs.replace(record, ranks=ranks, step_tracks=(steps,))


def test_work_in_one_function_is_suspected_after_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Job(monkeypatch).work(100) == 61


def test_a_long_evaluation_that_went_on_is_not_suspected_again(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)
    assert job.work(50) is None
    job.step = 2
    assert job.work(900) is None


def test_a_look_that_sees_no_wait_does_not_make_a_loop_look_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)
    assert job.work(50) is None
    assert job.work(1, wait=None) is None
    assert job.work(100) == 61


def _columns() -> tuple[str, ...]:
    return tuple(field for field in StepTrack.__struct_fields__ if field not in ("rank", "dropped"))
