"""A monitor that sees a part of the ranks, as one of two that watch a node each: no verdict on what it does not see."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ddpdoctor.check import TooLittleEvidence
from ddpdoctor.checks.speed import exposed_communication, slow_link, straggler
from ddpdoctor.diagnosis.performance.summarise import summarise
from ddpdoctor.diagnosis.performance.verdict import run_verdict
from ddpdoctor.finding import Finding
from ddpdoctor.record.model import RunRecord, Wrap
from tests.diagnosis.measured_job import MeasuredJob

COMPUTE = {"data_wait": 1.0, "forward": 20.0, "backward": 40.0, "optimizer": 5.0, "other": 2.0}
EVERYONE = (0, 1, 2, 3)


def part(seen: tuple[int, ...], slower: Any = None, **how: Any) -> RunRecord:
    """What is recorded of some ranks of a job of four."""
    record = (
        MeasuredJob(4)
        .run(60, COMPUTE, slower, **how)
        .record(wraps=[Wrap(rank=rank, wrap=0, ranks=EVERYONE) for rank in EVERYONE])
    )
    return msgspec.structs.replace(
        record,
        ranks=tuple(rank for rank in record.ranks if rank.rank in seen),
        wraps=tuple(wrap for wrap in record.wraps if wrap.rank in seen),
        step_tracks=tuple(track for track in record.step_tracks if track.rank in seen),
        call_tracks=tuple(track for track in record.call_tracks if track.rank in seen),
    )


def stragglers(record: RunRecord) -> list[Finding]:
    return [found for found in straggler.in_run(record) if isinstance(found, Finding)]


@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("check", [exposed_communication])
def test_waiting_for_ranks_that_are_not_seen_is_not_laid_to_the_network(check: Any, barrier: bool) -> None:
    record = part((0, 1), {3: {"forward": 50.0}}, transfer=1.0, barrier=barrier)
    with pytest.raises(TooLittleEvidence, match=r"^2 of 4 ranks are not visible here and may have been the late ones$"):
        list(check.in_run(record))
    assert list(slow_link.in_run(record)) == []
    assert stragglers(record) == []


def test_such_a_run_is_neither_healthy_nor_slow() -> None:
    late: Any
    for late in ({}, {3: {"forward": 50.0}}):
        verdict = run_verdict(summarise(part((0, 1), late, transfer=1.0)), ())
        assert (verdict.state, verdict.code) == ("unknown", "")
        assert verdict.text == "2 of 4 ranks are visible here, and nothing slow was found on these"
        assert "ddpdoctor profile --" in verdict.next
        assert any("of the step (51.0 ms) they wait for" in why for why in verdict.why) is bool(late)


def test_no_bandwidth_is_made_of_what_may_be_waiting() -> None:
    whole = summarise(part(EVERYONE, transfer=30.0)).traffic[0]
    assert (whole.group, whole.bus_bandwidth_bytes_per_s is None) == ("all 4 ranks", False)
    of_two = summarise(part((0, 1), transfer=30.0)).traffic[0]
    assert (of_two.group, of_two.bus_bandwidth_bytes_per_s) == ("all 4 ranks", None)


def test_a_straggler_among_those_that_are_seen_is_named() -> None:
    (finding,) = stragglers(part((2, 3), {3: {"forward": 25.0}}, transfer=4.0))
    assert finding.title == "rank 3 keeps rank 2 waiting for 26% of the step (25.0 ms) because of its forward"


def test_who_waits_himself_for_a_rank_that_is_not_seen_is_no_straggler() -> None:
    assert stragglers(part((2, 3), {3: {"forward": 25.0}, 0: {"forward": 80.0}}, transfer=4.0)) == []
    assert len(stragglers(part(EVERYONE, {3: {"forward": 25.0}, 0: {"forward": 80.0}}, transfer=4.0))) == 1


def test_a_rank_that_is_seen_but_made_no_steps_hides_the_waiting_as_before() -> None:
    record = part(EVERYONE, transfer=4.0)
    stepless = msgspec.structs.replace(record, step_tracks=record.step_tracks[:3])
    summary = summarise(stepless)
    assert summary.unseen == 0
    assert [rank.waiting_ns for rank in summary.ranks] == [None] * 3
