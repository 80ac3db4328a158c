"""When a finding of a watched job appears, when it is over, and which times are noted."""

from __future__ import annotations

from ddpdoctor.finding import Finding, Severity
from ddpdoctor.monitor.finding_hold import APPEARS_AFTER_NS, OVER_AFTER_NS, FindingHold
from tests.index_of_checks import STANDS_FOR

SECOND_NS = 1_000_000_000


def _finding(
    title: str = "a", *, code: str = "DDP401", severity: Severity = Severity.WARNING, rank: int = 0
) -> Finding:
    return Finding(
        code=code,
        name=code,
        trouble=STANDS_FOR.get(code),
        severity=severity,
        title=title,
        ranks=(rank,),
        basis=frozenset({"run"}),
        remedy="",
    )


def _shown(standing: FindingHold) -> list[tuple[str, int, int | None]]:
    return [(view.finding.title, view.since_ns, view.until_ns) for view in standing.views()]


def test_a_warning_appears_once_it_has_held_for_ten_seconds_with_the_time_at_which_it_began() -> None:
    standing = FindingHold()
    for second in range(10):
        standing.take([_finding(f"{second} %")], second * SECOND_NS)
        assert _shown(standing) == []
    standing.take([_finding("10%")], APPEARS_AFTER_NS)
    assert _shown(standing) == [("10%", 0, None)]


def test_a_warning_that_comes_and_goes_never_appears() -> None:
    standing = FindingHold()
    for second in range(60):
        standing.take([_finding()] if second % 5 else [], second * SECOND_NS)
    assert _shown(standing) == []


def test_a_straggler_that_is_another_rank_at_each_look_never_appears() -> None:
    standing = FindingHold()
    for second in range(60):
        standing.take([_finding(rank=second % 2)], second * SECOND_NS)
    assert _shown(standing) == []


def test_an_error_appears_at_once_and_above_the_warnings() -> None:
    standing = FindingHold()
    for second in range(11):
        standing.take([_finding("slow")], second * SECOND_NS)
    standing.take([_finding("slow"), _finding("hangs", code="DDP301", severity=Severity.ERROR)], 12 * SECOND_NS)
    assert [title for title, _, _ in _shown(standing)] == ["hangs", "slow"]


def test_a_finding_is_over_when_it_has_not_been_seen_for_long_enough_and_ends_when_it_was_seen_last() -> None:
    standing = FindingHold()
    for second in range(21):
        standing.take([_finding()], second * SECOND_NS)
    standing.take([], 20 * SECOND_NS + OVER_AFTER_NS - 1)
    assert _shown(standing) == [("a", 0, None)]
    standing.take([], 20 * SECOND_NS + OVER_AFTER_NS)
    assert _shown(standing) == [("a", 0, 20 * SECOND_NS)]
    standing.take([_finding()], 60 * SECOND_NS)
    standing.take([_finding()], 70 * SECOND_NS)
    assert _shown(standing) == [("a", 60 * SECOND_NS, None), ("a", 0, 20 * SECOND_NS)]


def test_a_job_that_stands_still_neither_gets_nor_loses_a_warning_but_errors_at_once() -> None:
    standing = FindingHold()
    for second in range(11):
        standing.take([_finding("slow")], second * SECOND_NS)
    standing.take([_finding("new", code="DDP404")], 11 * SECOND_NS)
    hang = _finding("hangs", code="DDP301", severity=Severity.ERROR)
    for second in range(12, 60):
        standing.take([_finding("new", code="DDP404"), hang], second * SECOND_NS, moved=False)
    assert [title for title, _, until_ns in _shown(standing) if until_ns is None] == ["hangs", "slow"]
    standing.take([], 80 * SECOND_NS, moved=False)
    assert [title for title, _, until_ns in _shown(standing) if until_ns is None] == ["slow"]


def test_a_standstill_that_may_go_on_is_shown_at_once_and_a_long_wait_after_a_while_though_no_step_is_made() -> None:
    standing = FindingHold()
    for second in range(11):
        stands, waits = _finding("stands", code="DDP305"), _finding("waits", code="DDP307")
        standing.take([stands, waits, _finding("slow")], second * SECOND_NS, moved=False)
        assert [title for title, _, _ in _shown(standing)] == (["stands"] if second < 10 else ["stands", "waits"])


def test_a_hang_that_was_got_over_is_over_at_the_end_however_soon_that_came() -> None:
    standing = FindingHold()
    hang = _finding("stands", code="DDP305", severity=Severity.ERROR)
    other = _finding("mismatch", code="DDP304", severity=Severity.ERROR)
    standing.take([hang, other], 10 * SECOND_NS, moved=False)
    standing.take([], 12 * SECOND_NS)
    standing.end_standstill(9 * SECOND_NS)
    assert [title for title, _, until_ns in _shown(standing) if until_ns is None] == ["stands", "mismatch"]
    standing.end_standstill(12 * SECOND_NS)
    assert _shown(standing) == [
        ("mismatch", 10 * SECOND_NS, None),
        ("stands", 10 * SECOND_NS, 10 * SECOND_NS),
    ]


def test_nothing_is_left_of_a_suspicion_that_the_job_refutes_by_going_on() -> None:
    standing = FindingHold()
    standing.take([_finding("seems to loop", code="DDP305", severity=Severity.ERROR)], 10 * SECOND_NS, moved=False)
    standing.end_standstill(12 * SECOND_NS, refuted=True)
    assert _shown(standing) == []


def test_a_run_is_settled_once_it_was_judged_for_as_long_as_a_warning_takes_and_none_is_on_its_way() -> None:
    standing = FindingHold()
    standing.take([], 0, judged=False)
    standing.take([], 20 * SECOND_NS)
    standing.take([_finding(), _finding(code="DDP405", severity=Severity.ADVICE)], 29 * SECOND_NS)
    assert [finding.severity for finding in standing.pending] == [Severity.WARNING]
    standing.take([_finding()], 30 * SECOND_NS)
    assert not standing.is_settled
    standing.take([], 33 * SECOND_NS)
    assert standing.is_settled
    assert standing.pending == ()
    standing.take([_finding()], 36 * SECOND_NS)
    assert standing.is_settled, "what was well is well until a warning is shown"


def test_what_is_shown_is_not_pending() -> None:
    standing = FindingHold()
    for second in range(11):
        standing.take([_finding()], second * SECOND_NS)
    assert (standing.pending, standing.is_settled) == ((), True)
