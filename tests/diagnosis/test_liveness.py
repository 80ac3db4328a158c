from __future__ import annotations

import pytest

from ddpdoctor.diagnosis.live.liveness import Sample, at_rest, judge_liveness


def samples(seconds: int, cpu_ns: int = 0, io_bytes: int = 0, stacks: str = "a") -> list[Sample]:
    """One sample a second; the counters grow evenly, the stacks repeat."""
    return [
        Sample(
            time_ns=second * 1_000_000_000,
            cpu_ns=second * cpu_ns,
            io_bytes=second * io_bytes,
            stack_hash=stacks[second % len(stacks)].strip(),
        )
        for second in range(seconds + 1)
    ]


def test_a_rank_without_any_sign_of_life_is_stuck() -> None:
    assert judge_liveness(samples(6), 5.0) == "stuck"
    assert judge_liveness(samples(6, cpu_ns=9_000_000), 5.0) == "stuck"


@pytest.mark.parametrize(
    "seen",
    [
        [],
        samples(4),
        samples(6, cpu_ns=20_000_000),
        samples(6, io_bytes=1),
        samples(6, stacks="ab"),
        samples(6, stacks=" "),
    ],
    ids=["nothing seen", "too short", "computes", "reads", "moves", "no stack"],
)
def test_any_sign_of_life_is_busy(seen: list[Sample]) -> None:
    assert judge_liveness(seen, 5.0) == "busy"


def test_only_the_last_seconds_count() -> None:
    busy = samples(3, cpu_ns=1_000_000_000)
    idle = [
        Sample(time_ns=(4 + second) * 1_000_000_000, cpu_ns=3_000_000_000, io_bytes=0, stack_hash="a")
        for second in range(6)
    ]
    assert judge_liveness(busy + idle, 5.0) == "stuck"
    assert judge_liveness(busy + idle[:3], 5.0) == "busy"


def test_a_rank_that_only_asks_and_sleeps_is_at_rest_whatever_its_stack() -> None:
    assert at_rest(samples(6, cpu_ns=40_000_000, stacks="ab"), 5.0)


@pytest.mark.parametrize(
    "seen",
    [[], samples(4), samples(6, cpu_ns=200_000_000), samples(6, io_bytes=1)],
    ids=["nothing seen", "too short", "computes", "reads"],
)
def test_whoever_computes_or_reads_may_make_what_a_rank_asks_for(seen: list[Sample]) -> None:
    assert not at_rest(seen, 5.0)
