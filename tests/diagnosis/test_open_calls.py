"""Sends and receives of a watched job, which torch's flight recorder does not know with gloo, are seen to wait."""

from __future__ import annotations

from array import array

import msgspec
import pytest

from ddpdoctor.diagnosis.divergence.matching import Matcher
from ddpdoctor.diagnosis.divergence.waiting import blocked_ranks
from ddpdoctor.diagnosis.live_verdict import VerdictMemory, live_verdict
from ddpdoctor.finding import Frame
from ddpdoctor.record import layout
from ddpdoctor.record.model import Job, Rank, RunRecord, Site
from ddpdoctor.record.streams.collectives import Group
from ddpdoctor.record.streams.measured import CallTrack, RankHeartbeat

SECOND = 1_000_000_000


def job(*calls: tuple[str, int], stands_ms: int = 4_000) -> RunRecord:
    """A job of as many ranks as there are calls; each has stood in its own, a kind and a peer, for 4 s."""
    ranks = tuple(range(len(calls)))
    tracks = tuple(
        CallTrack(
            rank=rank,
            kinds=layout.CALL_KINDS,
            group=array("q", [0]),
            step=array("q", [3]),
            left_at_ns=array("q", [0]),
            size_bytes=array("q", [8]),
            kind=array("q", [layout.CALL_KINDS.index(kind)]),
            sequence=array("q", [-1]),
            peer=array("q", [peer]),
            entered_at_ns=array("q", [SECOND]),
            site=array("q", [rank]),
        )
        for rank, (kind, peer) in enumerate(calls)
    )
    beats = tuple(
        RankHeartbeat(
            rank=rank, beat_at_ns=5 * SECOND, phase="explicit", phase_since_ns=SECOND, step=3, collective=kind,
            sequence=-1, enqueued=0, completed=0, site=rank, unchanged_ms=stands_ms,
        )
        for rank, (kind, _) in enumerate(calls)
    )  # fmt: skip
    return RunRecord(
        job=Job(kind="run", world_size=len(ranks), ended_ns=5 * SECOND),
        ranks=tuple(Rank(rank=rank, end="running") for rank in ranks),
        groups=(Group(ranks=ranks),),
        sites=tuple(Site(frames=(Frame("train.py", 10 + rank, "main"),)) for rank in ranks),
        call_tracks=tracks,
        heartbeats=beats,
    )


@pytest.mark.parametrize(
    "calls",
    [
        (("recv", 1), ("recv", 0)),
        (("irecv", 1), ("recv", 0)),
        (("send", 1), ("send", 0)),
        (("recv", 1), ("recv", 2), ("recv", 0)),
    ],
)
def test_a_cycle_of_waits_is_a_standstill(calls: tuple[tuple[str, int], ...]) -> None:
    record, memory = job(*calls), VerdictMemory()
    assert live_verdict(memory, record, 5 * SECOND) is None  # It has to look the same for a moment.
    found = live_verdict(memory, record, 6 * SECOND)
    assert found is not None
    assert (found.form, found.culprit) == ("standstill", None)
    assert [turn.line and turn.line.line for turn in found.turns] == [10 + rank for rank in range(len(calls))]


def test_what_is_on_its_way_is_no_wait() -> None:
    assert blocked_ranks(job(("send", 1), ("recv", 0)), Matcher()) == {}
    assert blocked_ranks(job(("isend", 1), ("irecv", 0)), Matcher()) == {}


def test_a_rank_that_has_just_come_does_not_wait_yet() -> None:
    assert blocked_ranks(job(("recv", 1), ("recv", 0), stands_ms=100), Matcher()) == {}


def test_a_receive_from_anybody_waits_for_nobody_in_particular() -> None:
    blocked = blocked_ranks(job(("recv", -1), ("recv", 0)), Matcher())
    assert (blocked[0].missing, blocked[1].missing) == ((), (0,))


def test_who_has_not_come_to_a_monitored_barrier_is_missing() -> None:
    record = job(("monitored_barrier", -1), ("recv", 0))
    first, second = record.call_tracks
    tracks = msgspec.structs.replace(first, sequence=array("q", [7])), second
    busy = msgspec.structs.replace(record.heartbeats[1], collective="")
    alone = msgspec.structs.replace(record, call_tracks=tracks, heartbeats=(record.heartbeats[0], busy))
    blocked = blocked_ranks(alone, Matcher())
    assert {rank: entry.missing for rank, entry in blocked.items()} == {0: (1,)}
    there = tuple(msgspec.structs.replace(track, sequence=array("q", [7])) for track in record.call_tracks)
    kinds = tuple(msgspec.structs.replace(track, kind=there[0].kind, peer=array("q", [-1])) for track in there)
    beats = tuple(msgspec.structs.replace(beat, collective="monitored_barrier") for beat in record.heartbeats)
    both = msgspec.structs.replace(record, call_tracks=kinds, heartbeats=beats)
    assert {entry.missing for entry in blocked_ranks(both, Matcher()).values()} == {()}
