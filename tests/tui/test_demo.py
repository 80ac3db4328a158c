"""The demo tells the same story every time, and its numbers agree with each other."""

from __future__ import annotations

import pytest

from ddpdoctor.monitor.replay import demo
from ddpdoctor.tui.screens.pages import PAGES, paint_screen
from ddpdoctor.tui.view import View
from tests.demo.__main__ import BEGAN_AT_NS, LENGTH_S
from tests.demo.job import demo_snapshot
from tests.tui import runs

S = 1_000_000_000


def test_a_demo_of_one_seed_is_the_same_every_time() -> None:
    for seconds in (0.0, 7.5, 21.25, 60.0):
        assert demo_snapshot(int(seconds * S), runs.NOW) == demo_snapshot(int(seconds * S), runs.NOW)
    assert demo_snapshot(S, runs.NOW, seed=2) != demo_snapshot(S, runs.NOW)


@pytest.mark.parametrize(
    ("seconds", "state", "code"),
    [(0, "healthy", ""), (7, "slow", "DDP403"), (22, "slow", "DDP404"), (36, "healthy", ""), (41, "broken", "DDP103")],
)
def test_each_act_has_its_verdict_which_says_what_to_do(seconds: int, state: str, code: str) -> None:
    snapshot = demo_snapshot(seconds * S, runs.NOW)
    assert (snapshot.verdict.state, snapshot.verdict.code) == (state, code)
    assert bool(snapshot.verdict.next) == (state != "healthy")
    assert snapshot.source == "demo"
    assert (snapshot.stall is not None) == (state == "broken")


def test_a_stranger_sees_within_ten_seconds_what_is_wrong() -> None:
    first = next(second for second in range(60) if demo_snapshot(second * S, runs.NOW).verdict.state != "healthy")
    assert first <= 10


def test_the_figures_agree_with_each_other() -> None:
    for second in range(60):
        snapshot = demo_snapshot(second * S, runs.NOW)
        for phases in [snapshot.phases, *(rank.phases for rank in snapshot.ranks)]:
            assert phases is not None
            parts = (
                phases.data_wait_ns + phases.forward_ns + phases.backward_compute_ns + (phases.exposed_waiting_ns or 0)
                + (phases.exposed_transfer_ns or 0) + phases.explicit_ns + phases.optimizer_ns + phases.other_ns
            )  # fmt: skip
            assert parts == pytest.approx(phases.step_ns)
    slow = demo_snapshot(12 * S, runs.NOW)
    assert slow.phases is not None and slow.phases.step_ns == pytest.approx(269e6, rel=0.01)
    assert slow.ranks[0].waiting_ns == pytest.approx(84e6, rel=0.03)


def test_the_job_stands_still_from_the_hang_on() -> None:
    steps = [demo_snapshot(second * S, runs.NOW).steps for second in range(50)]
    assert steps == sorted(step for step in steps if step is not None)
    assert steps[39] == steps[49] == 4_312


def test_the_recording_is_the_story_and_can_be_held_and_moved() -> None:
    replay = demo()
    assert replay.playback().speed == 1.0 and replay.playback().elapsed_ns < LENGTH_S * S
    replay.play(0.0)
    for second in (0, 7, 22, 41, LENGTH_S):
        replay.seek(second * S)
        assert replay.snapshot() == demo_snapshot(second * S, BEGAN_AT_NS), "run `python -m tests.demo`"
        assert replay.playback().elapsed_ns == second * S
    replay.seek(10**15)
    assert replay.playback().elapsed_ns == LENGTH_S * S
    assert replay.snapshot().stall is not None


def test_the_demo_begins_again_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = [10**12]
    monkeypatch.setattr("ddpdoctor.monitor.replay.time.monotonic_ns", lambda: now_ns[0])
    replay = demo()
    replay.play(1.0)
    for passed_s, wanted_s in ((59, 59), (LENGTH_S, LENGTH_S), (LENGTH_S + 7, 7), (2 * LENGTH_S + 3, 3)):
        now_ns[0] = 10**12 + passed_s * S
        assert replay.playback().elapsed_ns == pytest.approx(wanted_s * S, abs=3)


def test_every_page_can_be_drawn_at_every_moment_and_size() -> None:
    for second in range(0, 60, 3):
        snapshot = demo_snapshot(second * S, runs.NOW)
        for page in PAGES:
            for size in ((80, 24), (132, 43), (240, 70), (10, 4)):
                assert len(paint_screen(View(snapshot=snapshot, page=page, opened="3"), *size).lines) == max(4, size[1])
