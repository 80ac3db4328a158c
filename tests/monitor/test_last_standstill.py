"""A standstill stays the cause whatever ends the job; one that was overcome, or ended by its culprit, does not."""

from __future__ import annotations

import msgspec

from ddpdoctor.diagnosis.divergence.divergence import Divergence
from ddpdoctor.diagnosis.divergence.next_calls import NextCall
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.monitor.finding_hold import FORGOTTEN_AFTER_NS, LastStandstill
from ddpdoctor.monitor.snapshot import FindingView, StallView
from ddpdoctor.record.model import Job, Rank, RankException, RunRecord
from ddpdoctor.record.streams.measured import RankHeartbeat
from tests.index_of_checks import STANDS_FOR

STALL = StallView(title="rank 1 is stuck at train.py:3 while rank 0 waits", since_ns=5, sides=(), may_go_on=True)
STUCK = Divergence(
    form="stuck",
    turns=(NextCall(rank=0, action="collective", waiting=True), NextCall(rank=1, action="elsewhere")),
    culprit=1,
)


def finding(code: str, title: str = STALL.title, severity: Severity = Severity.ERROR) -> Finding:
    return Finding(
        code=code,
        name="x",
        trouble=STANDS_FOR.get(code),
        severity=severity,
        title=title,
        ranks=(1,),
        basis=frozenset({"run"}),
        remedy="",
    )


HANG = finding("DDP305", severity=Severity.WARNING)


def record(*ranks: Rank, completed: int = 40, at_ns: int = 10**10, unchanged_ms: int = 9000) -> RunRecord:
    given = {rank.rank: rank for rank in ranks}
    every = tuple(given.get(number, Rank(rank=number, end="running")) for number in (0, 1))
    heartbeats = tuple(
        RankHeartbeat(
            rank=number, beat_at_ns=at_ns, phase="backward", phase_since_ns=1, step=40, collective="", sequence=-1,
            enqueued=41, completed=completed, site=-1, unchanged_ms=unchanged_ms,
        )
        for number in (0, 1)
    )  # fmt: skip
    return RunRecord(job=Job(kind="run", world_size=2, ended_ns=at_ns), ranks=every, heartbeats=heartbeats)


def raised(rank: int, kind: str, *, communication: bool = False, by_signal: int = 0) -> Rank:
    error = RankException(time_ns=9, type=kind, message="", communication=communication, by_signal=by_signal)
    return Rank(rank=rank, end="raised", ended_ns=9, exceptions=(error,))


def stood() -> LastStandstill:
    last = LastStandstill()
    assert last.look(STALL, HANG, STUCK, record(), told_to_end=False, ended=False) == STALL
    assert not last.holds
    return last


def test_a_job_that_was_told_to_end_ended_in_its_standstill() -> None:
    last = stood()
    gone = record(raised(0, "RuntimeError", communication=True), Rank(rank=1, end="signalled", ended_ns=9))
    shown = last.look(None, None, None, gone, told_to_end=True, ended=True)
    assert shown == msgspec.structs.replace(STALL, may_go_on=False, cut_short=True) and not shown.proved
    views = (FindingView(finding=finding("DDP703", "rank 1 was gone"), since_ns=1),)
    speed = FindingView(finding=finding("DDP401", "slow", Severity.WARNING), since_ns=1)
    told = last.as_cause((*views, speed))
    assert [(view.finding.code, view.finding.severity) for view in told] == [
        ("DDP305", Severity.ERROR),
        ("DDP401", Severity.WARNING),
    ]


def test_one_that_was_proved_before_the_job_was_told_to_end_stays_so() -> None:
    last = LastStandstill()
    proved = msgspec.structs.replace(STALL, may_go_on=False)
    last.look(proved, HANG, STUCK, record(), told_to_end=False, ended=False)
    shown = last.look(None, None, None, record(), told_to_end=True, ended=False)
    assert shown is not None and shown.proved


def test_one_that_is_proved_after_a_rank_has_given_up_is_proved() -> None:
    last = stood()
    gave_up, proved = raised(0, "DistBackendError"), msgspec.structs.replace(STALL, may_go_on=False)
    dead, stuck = Rank(rank=1, end="signalled", ended_ns=9, stuck=True), Rank(rank=1, end="running", stuck=True)
    for stall, other in ((None, stuck), (STALL, stuck), (proved, dead)):
        shown = last.look(stall, HANG, STUCK, record(gave_up, other), told_to_end=False, ended=False)
        assert shown is not None and not shown.may_go_on and not shown.proved
    assert last.look(proved, HANG, STUCK, record(gave_up, dead), told_to_end=False, ended=True) == shown
    for stall in (proved, None):
        shown = last.look(stall, HANG, STUCK, record(gave_up, stuck), told_to_end=False, ended=False)
        assert shown is not None and shown.proved


def test_ranks_that_vanish_together_ended_in_it_as_well() -> None:
    last = stood()
    gone = record(*(Rank(rank=number, end="signalled", ended_ns=9) for number in (0, 1)))
    assert last.look(None, None, None, gone, told_to_end=False, ended=True) is not None
    assert last.holds


def test_headway_of_all_ranks_ends_it() -> None:
    last = stood()
    assert last.look(None, None, None, record(completed=41), told_to_end=False, ended=False) is None
    assert last.look(None, None, None, record(completed=41), told_to_end=True, ended=True) is None
    assert not last.holds


def test_it_is_forgotten_when_no_look_finds_it_for_a_while() -> None:
    last = stood()
    later = record(at_ns=10**10 + 2 * FORGOTTEN_AFTER_NS)
    assert last.look(None, None, None, later, told_to_end=False, ended=False) is None
    assert last.look(None, None, None, later, told_to_end=True, ended=True) is None


def test_it_is_remembered_while_its_culprit_is_where_it_was() -> None:
    last = stood()
    later = record(at_ns=10**10 + 4 * FORGOTTEN_AFTER_NS, unchanged_ms=9000 + 4 * FORGOTTEN_AFTER_NS // 10**6)
    assert last.look(None, None, None, later, told_to_end=False, ended=False) is None
    assert last.look(None, None, None, later, told_to_end=True, ended=True) is not None


def test_a_culprit_that_fails_by_itself_is_a_cause_of_its_own() -> None:
    last = stood()
    assert last.look(None, None, None, record(raised(1, "TimeoutError")), told_to_end=False, ended=True) is None
    assert not last.holds


def test_what_a_handler_of_a_signal_raises_was_sent_from_outside() -> None:
    last = stood()
    ended = record(raised(1, "Preempted", by_signal=15), Rank(rank=0, end="signalled", signal=15, ended_ns=9))
    assert last.look(None, None, None, ended, told_to_end=False, ended=True) is not None
    assert last.holds


def test_a_waiting_rank_that_gives_up_is_none() -> None:
    last = stood()
    gone = record(raised(0, "DistBackendError"), Rank(rank=1, end="signalled", ended_ns=9))
    assert last.look(None, None, None, gone, told_to_end=False, ended=True) is not None


def test_nothing_that_begins_with_the_end_is_a_standstill() -> None:
    last = LastStandstill()
    assert last.look(STALL, HANG, STUCK, record(), told_to_end=True, ended=False) is None
    assert not last.holds
