"""How often a run is looked at and judged."""

from __future__ import annotations

import time

from ddpdoctor.profile.watch import Pace

SECOND_NS = 1_000_000_000


def _work(pace: Pace, now_ns: int, cost_ns: int) -> None:
    with pace.work(now_ns):
        until_ns = time.thread_time_ns() + cost_ns
        while time.thread_time_ns() < until_ns:
            pass


def test_dear_work_is_due_later_but_what_the_first_time_imports_does_not_count() -> None:
    pace = Pace(3 * SECOND_NS, 10 * SECOND_NS, share=0.01)
    assert pace.is_due(0)
    _work(pace, 0, 50_000_000)
    assert pace.is_due(3 * SECOND_NS)
    _work(pace, 3 * SECOND_NS, 50_000_000)
    assert not pace.is_due(8 * SECOND_NS - 1)
    _work(pace, 8 * SECOND_NS, 120_000_000)
    assert not pace.is_due(18 * SECOND_NS - 1)
    assert pace.is_due(18 * SECOND_NS)
