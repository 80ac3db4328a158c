"""What a run is said to be on its way to before its first step, and how ranks end that were told to."""

from __future__ import annotations

import signal

import pytest

from ddpdoctor.diagnosis.performance.summarise import summarise
from ddpdoctor.diagnosis.performance.summary import RunVerdict
from ddpdoctor.monitor.build_snapshot import Look, build_snapshot, state_of
from ddpdoctor.monitor.replay import Series
from ddpdoctor.monitor.snapshot import RunState
from ddpdoctor.record.model import Job, Rank, RunRecord

UNKNOWN = RunVerdict(state="unknown", text="no training step has been measured")


def said(joined: int, expected: int, state: RunState = "waiting", verdict: RunVerdict = UNKNOWN) -> str:
    record = RunRecord(
        job=Job(kind="run", ranks_expected=expected, world_size=0),
        ranks=tuple(Rank(rank=rank, end="running") for rank in range(joined)),
    )
    look = Look(now_ns=1, record=record, summary=summarise(record), verdict=verdict, state=state)
    return build_snapshot(look, Series(), "train.py", "/run").verdict.text


@pytest.mark.parametrize(
    ("joined", "expected", "wanted"),
    [
        (0, 8, "no rank has joined a process group yet: they start Python and import torch"),
        (0, 0, "no rank has joined a process group yet: they start Python and import torch"),
        (3, 8, "3 of 8 ranks joined the process group; it is complete when all have"),
        (8, 8, "8 ranks joined the process group, and none has made a training step yet"),
    ],
)
def test_a_run_that_starts_says_what_it_waits_for(joined: int, expected: int, wanted: str) -> None:
    assert said(joined, expected) == wanted


def test_a_verdict_that_is_known_and_a_run_that_trains_keep_their_words() -> None:
    assert said(2, 2, "running") == UNKNOWN.text
    broken = RunVerdict(state="broken", text="rank 1 raised ValueError")
    assert said(1, 2, "waiting", broken) == broken.text


@pytest.mark.parametrize(
    ("rank", "wanted"),
    [
        (Rank(rank=0, end="signalled", signal=signal.SIGTERM), "ended by ddpdoctor"),
        (Rank(rank=0, end="unknown"), "ended by ddpdoctor"),
        (Rank(rank=0, end="finished"), "finished"),
        (Rank(rank=0, end="left-by-exit", exit_code=3), "exited with code 3"),
    ],
)
def test_ranks_that_were_told_to_end_are_ended_by_ddpdoctor(rank: Rank, wanted: str) -> None:
    assert state_of(rank, None, 1, told_to_end=True) == wanted
    assert "ddpdoctor" not in state_of(rank, None, 1)
