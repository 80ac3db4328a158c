"""How many batches a pass yields, and when the rehearsal has seen enough: counted without ranks."""

from __future__ import annotations

import pytest

from ddpdoctor.probe.rehearsal.schedule import AFTERWARDS_S, Schedule, Trail


class Endings:
    """Takes the place of the ending, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.deadlines: list[float] = []

    def end(self, reason: str, text: str = "") -> None:
        self.ended.append(reason)

    def in_seconds(self, seconds: float) -> None:
        self.deadlines.append(seconds)


def schedule(endings: Endings | None = None, batches: int = 4, full: bool = False) -> Schedule:
    return Schedule(endings or Endings(), batches, full)  # type: ignore[arg-type]


def run(plan: Schedule, loader: int, place: str, trains: bool = True, every: int = 1, most: int = 200) -> int:
    """Make one pass and say how many batches it yielded; with ``every``, an optimizer step after so many backwards."""
    trail = plan.begin(loader, place)
    while not plan.is_over(trail) and trail.yielded < most:
        plan.drawn(trail)
        if trains:
            plan.backward_ended()
            if trail.yielded % every == 0:
                plan.optimizer_stepped(0)
    plan.end(trail)
    return trail.yielded


def test_two_training_passes_then_one_batch_and_ten_seconds() -> None:
    endings = Endings()
    plan = schedule(endings)
    assert [run(plan, 0, "train"), run(plan, 1, "validate", trains=False)] == [4, 4]
    assert not endings.deadlines
    assert [run(plan, 0, "train"), run(plan, 1, "validate", trains=False), run(plan, 0, "train")] == [4, 1, 1]
    assert endings.deadlines == [AFTERWARDS_S]
    assert not endings.ended


def test_a_later_phase_has_its_own_two_passes_and_its_own_time() -> None:
    endings = Endings()
    plan = schedule(endings)
    assert [run(plan, 0, "train") for _ in range(3)] == [4, 4, 1]
    assert [run(plan, 1, "tune") for _ in range(3)] == [4, 4, 1]
    assert run(plan, 2, "test", trains=False) == 4
    assert endings.deadlines == [AFTERWARDS_S] * 3


@pytest.mark.parametrize(("every", "yielded"), [(1, 4), (2, 4), (3, 6), (10, 20), (100, 64)])
def test_a_training_pass_goes_on_until_two_optimizer_steps(every: int, yielded: int) -> None:
    assert run(schedule(), 0, "train", every=every) == yielded


def test_more_batches_than_the_longest_extension_may_be_asked_for() -> None:
    assert run(schedule(batches=100), 0, "train", every=1_000) == 100


def test_passes_side_by_side_are_one_epoch() -> None:
    plan = schedule()
    for _ in range(2):
        trails = [plan.begin(number, "all clients") for number in range(3)]
        assert not any(trail.brief for trail in trails)
        for trail in trails:
            plan.drawn(trail)
        plan.backward_ended()
        for trail in trails:
            plan.end(trail)
    assert plan.begin(0, "all clients").brief


def test_an_iterator_that_is_kept_ends_its_epoch_when_the_next_one_begins() -> None:
    plan = schedule()
    kept: list[Trail] = []
    for _ in range(2):
        kept.append(plan.begin(0, "train"))
        plan.drawn(kept[-1])
        plan.backward_ended()
        plan.optimizer_stepped(0)
    assert plan.begin(0, "train").brief


def test_batches_that_were_fetched_ahead_make_a_training_pass_afterwards() -> None:
    plan = schedule()
    assert run(plan, 0, "train", trains=False) == 4
    late = [plan.backward_ended() for _ in range(4)]
    assert [trail.backwards for trail in late if trail is not None] == [4, 4, 4, 4]
    ahead = plan.begin(0, "train", main=False)
    assert ahead.patient, "the pass before was used up without an optimizer step"


def test_another_threads_pass_does_not_depend_on_how_far_training_is() -> None:
    plan = schedule()
    trail = plan.begin(0, "train", main=False)
    for _ in range(4):
        plan.drawn(trail)
    plan.backward_ended()
    assert plan.is_over(trail)
    plan.end(trail)
    assert not plan.begin(0, "train", main=False).patient, "three of its batches are still to be trained on"


def test_a_validation_whose_iterator_is_kept_is_no_training_pass() -> None:
    plan = schedule()
    train = plan.begin(0, "train")
    for _ in range(2):
        plan.drawn(train)
        plan.backward_ended()
    validation = plan.begin(1, "validate")
    plan.drawn(validation)
    plan.drawn(train)
    plan.backward_ended()
    assert (train.backwards, validation.backwards) == (3, 0)


def test_a_trial_validation_before_training_is_no_training_pass_either() -> None:
    plan = schedule()
    train, trial = plan.begin(0, "train"), plan.begin(1, "validate")
    for trail in (trial, trial, train):
        plan.drawn(trail)
    plan.backward_ended()
    assert (train.backwards, trial.backwards) == (1, 0)


def test_a_length_that_was_told_is_kept() -> None:
    plan = schedule()
    assert plan.length(0, true=100) == 4
    trail = plan.begin(0, "train")
    for _ in range(4):
        assert not plan.is_over(trail)
        plan.drawn(trail)
    assert plan.length(0, true=3) == 4, "what was told before stays true"
    assert plan.is_over(trail)
    assert schedule().length(0, true=3) == 3


@pytest.mark.parametrize(("open_pass", "steps"), [(False, 8), (True, 64)])
def test_steps_without_a_new_batch_end_the_rehearsal(open_pass: bool, steps: int) -> None:
    endings = Endings()
    plan = schedule(endings)
    trail = plan.begin(0, "train")
    plan.drawn(trail)
    plan.backward_ended()
    if not open_pass:
        plan.end(trail)
    for _ in range(steps - 1):
        plan.optimizer_stepped(0)
        plan.optimizer_stepped(1)
    assert not endings.ended
    plan.optimizer_stepped(0)
    assert endings.ended == ["steps"]


def test_a_full_rehearsal_is_never_cut() -> None:
    endings = Endings()
    plan = schedule(endings, full=True)
    assert [run(plan, 0, "train") for _ in range(4)] == [200] * 4
    assert plan.length(0, true=100) == 100
    for _ in range(100):
        plan.optimizer_stepped(0)
    assert (endings.ended, endings.deadlines) == ([], [])
