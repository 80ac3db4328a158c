from __future__ import annotations

from tests.benchmarks.start_up import BOUND, measure


def test_version_and_a_static_check_start_within_their_bound() -> None:
    medians = measure(runs=5)
    base = medians["python -c pass"]
    assert {name: seconds / base for name, seconds in medians.items() if seconds > BOUND * base} == {}
