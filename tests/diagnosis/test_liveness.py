from __future__ import annotations

import msgspec
import pytest

from ddpdoctor.diagnosis.stacks import ProcessSample, Standing, at_rest, judge_liveness, stands_on


def samples(seconds: int, cpu_ns: int = 0, io_bytes: int = 0, stacks: str = "a") -> list[ProcessSample]:
    """One sample a second; the counters grow evenly, the stacks repeat."""
    return [
        ProcessSample(
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
def test_any_sign_of_life_is_busy(seen: list[ProcessSample]) -> None:
    assert judge_liveness(seen, 5.0) == "busy"


def woken(runs_per_s: int, of: str = "main") -> list[ProcessSample]:
    """Six seconds in which a thread was given a core so often, which no counter of files or of the CPU tells."""
    counted = [sample.time_ns // 10**9 * runs_per_s for sample in samples(6)]
    return [
        msgspec.structs.replace(
            sample, main_runs=runs if of != "child" else 0, child_runs={7: runs} if of == "child" else {}
        )
        for sample, runs in zip(samples(6), counted, strict=True)
    ]


@pytest.mark.parametrize("of", ["main", "child"])
def test_a_thread_that_is_woken_again_and_again_gets_something(of: str) -> None:
    assert judge_liveness(woken(2, of), 5.0) == "busy"
    assert judge_liveness(woken(0, of), 5.0) == "stuck"


def test_a_loaders_questions_after_its_workers_and_those_for_the_interpreter_wake_nobody_to_go_on() -> None:
    asked = [msgspec.structs.replace(sample, main_runs=sample.time_ns // 5 // 10**9 * 2) for sample in samples(6)]
    assert judge_liveness(asked, 5.0) == "stuck"
    held = [msgspec.structs.replace(sample, is_held=True) for sample in woken(200)]
    assert judge_liveness(held, 5.0) == "stuck"


def test_a_child_that_came_or_went_meanwhile_was_woken_by_nobody() -> None:
    seen = samples(6)
    seen[-1] = msgspec.structs.replace(seen[-1], child_runs={7: 900})
    assert judge_liveness(seen, 5.0) == "stuck"
    seen[0] = msgspec.structs.replace(seen[0], child_runs={8: 900})
    assert judge_liveness(seen, 5.0) == "stuck"


def test_only_the_last_seconds_count() -> None:
    busy = samples(3, cpu_ns=1_000_000_000)
    idle = [
        ProcessSample(time_ns=(4 + second) * 1_000_000_000, cpu_ns=3_000_000_000, io_bytes=0, stack_hash="a")
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
def test_whoever_computes_or_reads_may_make_what_a_rank_asks_for(seen: list[ProcessSample]) -> None:
    assert not at_rest(seen, 5.0)


START = ProcessSample(time_ns=0, cpu_ns=0, io_bytes=0, stack_hash="a", main_runs=0)


def standing(seconds: int, **growing: int) -> Standing:
    """What two samples a second make of a thread in one place, whose counters grow so much each second."""
    found = None
    for half in range(2 * seconds + 1):
        counters = {name: half * each // 2 for name, each in growing.items()}
        found = stands_on(found, msgspec.structs.replace(START, time_ns=half * 500_000_000, **counters))
    assert found is not None
    return found


def test_a_thread_stands_on_whatever_little_the_rest_of_its_process_does() -> None:
    quiet = standing(100)
    assert (quiet.lasted_ns, quiet.restless) == (100 * 10**9, False)
    for rest in ({"io_bytes": 40}, {"io_bytes": 900_000}, {"cpu_ns": 50_000_000}):
        found = standing(100, **rest)
        assert (found.lasted_ns, found.restless) == (100 * 10**9, True), rest


@pytest.mark.parametrize(
    "growing",
    [{"main_runs": 1}, {"main_cpu_ns": 20_000_000}, {"cpu_ns": 200_000_000}, {"io_bytes": 3_000_000}, {"progress": 2}],
    ids=lambda growing: next(iter(growing)),
)
def test_a_thread_that_gets_something_or_whose_process_works_stands_nowhere(growing: dict[str, int]) -> None:
    assert standing(100, **growing).lasted_ns < 15 * 10**9


def test_a_clock_another_place_and_an_unknown_thread_begin_a_standing_anew() -> None:
    later = msgspec.structs.replace(START, time_ns=10**9)
    assert stands_on(stands_on(None, START), later).lasted_ns == 10**9
    for change in ({"main_wakes": True}, {"stack_hash": "b"}, {"stack_hash": ""}, {"main_runs": -1}):
        assert stands_on(stands_on(None, START), msgspec.structs.replace(later, **change)).lasted_ns == 0, change
