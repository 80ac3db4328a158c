"""Whether a standstill of a live run may go on by itself."""

from __future__ import annotations

import msgspec
import pytest

from ddpdoctor.diagnosis.divergence.divergence import Divergence
from ddpdoctor.diagnosis.divergence.next_calls import NextCall
from ddpdoctor.diagnosis.live_verdict import PATIENCE_NS, may_go_on
from ddpdoctor.record.model import Job, Rank, RunRecord
from ddpdoctor.record.streams.measured import RankHeartbeat

NOW_NS = 10**12
STUCK = Divergence(
    form="stuck",
    turns=(NextCall(rank=0, action="collective", waiting=True), NextCall(rank=1, action="elsewhere")),
    culprit=1,
)


@pytest.mark.parametrize(("restless", "may"), [((), False), ((0,), False), ((1,), True), ((0, 1), True)])
def test_one_whose_process_still_does_a_little_may_however_long_it_stands(restless: tuple[int, ...], may: bool) -> None:
    ranks = tuple(Rank(rank=rank, end="running", stuck=True, restless=rank in restless) for rank in (0, 1))
    heartbeat = RankHeartbeat(rank=1, beat_at_ns=NOW_NS, site=-1, unchanged_ms=2 * PATIENCE_NS // 10**6)
    record = RunRecord(job=Job(kind="run", world_size=2, ended_ns=NOW_NS), ranks=ranks, heartbeats=(heartbeat,))
    assert may_go_on(record, STUCK) is may
    young = msgspec.structs.replace(heartbeat, unchanged_ms=9_000)
    assert may_go_on(msgspec.structs.replace(record, heartbeats=(young,)), STUCK)
