"""The estimate that ends a rehearsal in time."""

from __future__ import annotations

from ddpdoctor.probe.rehearsal.schedule import Pace


class Watch:
    """A clock that is set, and an ending that remembers."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.ended: list[tuple[str, str]] = []

    def end(self, reason: str, text: str = "") -> None:
        self.ended.append((reason, text))


def _steps(taken_s: list[float], left: list[float], started_s: float = 0.0) -> Watch:
    watch = Watch()
    pace = Pace(watch, started_s, 120.0, lambda: watch.now_s)  # type: ignore[arg-type]
    pace.forward_begins()
    for seconds, batches in zip(taken_s, left, strict=True):
        watch.now_s += seconds
        pace.backward_ended()
        pace.stepped(batches)
        if watch.ended:
            break
        pace.forward_begins()
    return watch


def test_fast_steps_end_nothing() -> None:
    assert not _steps([9.0, 9.0, 9.0, 9.0], [3, 2, 1, 0]).ended


def test_a_step_that_leaves_no_time_for_the_rest_ends_it_at_once() -> None:
    watch = _steps([70.0, 70.0], [3, 2])
    assert watch.ended == [
        ("slow", "a batch takes 70.0 s, so 3 more do not fit into the time limit of 120 s"),
    ]
    assert watch.now_s == 70.0


def test_the_first_step_may_be_a_slow_start() -> None:
    assert not _steps([45.0, 5.0, 5.0, 5.0], [3, 2, 1, 0]).ended


def test_the_first_step_alone_does_not_say_what_the_others_take() -> None:
    assert not _steps([17.0, 0.1, 0.1, 0.1], [7, 6, 5, 0], started_s=-45.0).ended
    assert not _steps([20.0, 0.1, 0.1, 0.1], [20, 19, 18, 0]).ended


def test_the_second_step_says_it() -> None:
    watch = _steps([20.0, 20.0, 20.0], [20, 19, 18])
    assert watch.now_s == 40.0
    assert watch.ended == [("slow", "a batch takes 20.0 s, so 19 more do not fit into the time limit of 120 s")]


def test_later_steps_are_believed_in_full() -> None:
    assert _steps([30.0, 30.0], [3, 3]).now_s == 60.0
    assert _steps([30.0, 30.0], [3, 3]).ended


def test_nothing_is_left_to_wait_for_at_the_end_of_a_pass() -> None:
    assert not _steps([60.0, 60.0, 60.0], [1, 0, 0]).ended
