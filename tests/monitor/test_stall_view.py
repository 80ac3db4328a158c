"""Since when a job stands, and when its process group gives up, whenever somebody came to look."""

from __future__ import annotations

from ddpdoctor.diagnosis.divergence import describe
from ddpdoctor.diagnosis.divergence.divergence import find_divergence
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.monitor.build_snapshot import stall_view
from ddpdoctor.record.streams.collectives import Group
from ddpdoctor.record.streams.measured import RankHeartbeat
from tests.diagnosis.jobs import MILLISECOND_NS, healthy_job

SECOND_NS = 1_000 * MILLISECOND_NS


def test_who_attaches_later_is_told_for_how_long_the_job_has_stood() -> None:
    job = healthy_job()
    job.groups[0] = Group(ranks=(0, 1), backend="gloo", timeout_ns=60 * SECOND_NS)
    job.call(0, "barrier", 57)
    entered_ns = job.now_ns - MILLISECOND_NS
    job.call(1, "all_reduce", 50, 100, origin="ddp-backward")
    job.wait_in_last(0, 1)
    began_ns = job.now_ns
    job.tick(30_000)
    heartbeats = (
        RankHeartbeat(rank=0, beat_at_ns=job.now_ns, phase="explicit", phase_since_ns=entered_ns),
        RankHeartbeat(rank=1, beat_at_ns=job.now_ns, phase="backward", phase_since_ns=began_ns),
    )
    record = job.record(heartbeats=heartbeats)
    divergence = find_divergence(record)
    assert divergence is not None
    stall = stall_view(divergence, None, record, seen_ns=job.now_ns)
    assert stall.since_ns == began_ns, "until then some rank came to something new"
    assert stall.timeout_at_ns == entered_ns + 60 * SECOND_NS
    assert stall_view(divergence, None, job.record(), seen_ns=job.now_ns).since_ns == job.now_ns


def test_ranks_at_one_place_are_told_in_the_plural() -> None:
    job = healthy_job(ranks=3)
    job.call(0, "barrier", 57)
    for rank in (1, 2):
        job.call(rank, "all_reduce", 50, 100, origin="ddp-backward")
    job.wait_in_last(0, 1, 2)
    record = job.record()
    divergence = find_divergence(record)
    assert divergence is not None
    said = {side.ranks: side.text for side in stall_view(divergence, None, record, seen_ns=job.now_ns).sides}
    assert said[1, 2].startswith("wait in all_reduce") and said[0,].startswith("waits in barrier"), said


def test_the_rank_that_the_finding_names_is_the_culprit_and_not_the_one_that_died_of_it() -> None:
    job = healthy_job()
    job.reduce_gradients(0)
    job.wait_in_last(0)
    job.leave(1, "signalled", signal=6)
    record = job.record()
    divergence = find_divergence(record)
    assert divergence is not None and divergence.culprit == 1
    finding = Finding(
        code="DDP312",
        name="silent-desync",
        severity=Severity.ERROR,
        title="rank 0 is ahead",
        remedy="",
        basis=frozenset({"run"}),
        ranks=(0,),
        evidence=describe.facts(divergence, "run"),
    )
    for told, culprits in ((None, [(1,)]), (finding, [(0,)])):
        sides = stall_view(divergence, told, record, seen_ns=job.now_ns).sides
        assert [side.ranks for side in sides if side.culprit] == culprits
