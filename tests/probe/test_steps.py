"""Where a step begins and ends, for every form of training loop; the clock is driven by hand, in milliseconds."""

from __future__ import annotations

from pathlib import Path

from ddpdoctor.probe.journal import Journal
from ddpdoctor.probe.live.clocks import (
    BACKWARD,
    DATA_WAIT,
    EVALUATION,
    EXPLICIT,
    FORWARD,
    MEASURED_EVERY,
    OPTIMIZER,
    SAVING,
    DeviceTimes,
    GraphCaptures,
    Stopwatch,
)
from ddpdoctor.probe.live.steps import Source, Steps
from ddpdoctor.record import layout
from ddpdoctor.record.writer import offset_ns

MS = 1_000_000


class Loop:
    """Does what a training loop does, one thing after the other."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.rows: list[dict[str, int]] = []
        self.watch = Stopwatch()
        self.watch.since_ns = 0
        self.steps = Steps(self.watch, self._take)

    def fetch(self, source: Source, ms: int = 3, *, recording: bool = True, fresh: bool = False) -> None:
        self.steps.fetch_begins(source, recording, self._now())
        self.watch.enter(EVALUATION if self.steps.evaluating else DATA_WAIT, self._now())
        self.work(ms)
        self.watch.leave(self._now())
        self.steps.fetch_ended(8, fresh, self._now())

    def exhaust(self, source: Source) -> None:
        self.steps.fetch_begins(source, True, self._now())
        self.watch.enter(DATA_WAIT, self._now())
        self.work(1)
        self.watch.leave(self._now())
        self.steps.pass_ended(source)

    def forward(self, ms: int = 5) -> None:
        self.steps.trains(self._now())
        self._phase(FORWARD, ms)

    def backward(self, ms: int = 7) -> None:
        self.steps.trains(self._now())
        self._phase(BACKWARD, ms)
        self.steps.backward_ended(self._now())

    def step(self, optimizer: int = 1, ms: int = 2) -> None:
        self._phase(OPTIMIZER, ms)
        self.steps.optimizer_stepped(optimizer, self._now())

    def call(self, ms: int = 4) -> None:
        self._phase(EXPLICIT, ms)
        self.steps.called(self._now())

    def evaluate(self, ms: int) -> None:
        self.steps.pause(self._now())
        self._phase(EVALUATION, ms)

    def save(self, ms: int) -> None:
        self.steps.pause(self._now())
        self._phase(SAVING, ms)

    def work(self, ms: int) -> None:
        self.now_ms += ms

    def train(self, optimizer: int = 1) -> None:
        self.forward()
        self.backward()
        self.step(optimizer)

    def finished(self) -> list[dict[str, int]]:
        self.steps.finish()
        return self.rows

    def lengths(self) -> list[int]:
        return [row["ended_at_ns"] - row["started_at_ns"] for row in self.finished()]

    def phases(self, name: str) -> list[int]:
        return [row[name] for row in self.finished()]

    def _phase(self, phase: int, ms: int) -> None:
        self.watch.enter(phase, self._now())
        self.work(ms)
        self.watch.leave(self._now())

    def _now(self) -> int:
        return self.now_ms * MS

    def _take(self, row: tuple[int, ...]) -> None:
        named = dict(zip(layout.STEP_FIELDS, row, strict=True))
        self.rows.append({name: value // MS if name.endswith("_ns") else value for name, value in named.items()})


def test_a_plain_loop_has_a_step_for_each_batch_whose_phases_are_its_own() -> None:
    loop, source = Loop(), Source()
    for _ in range(4):
        loop.fetch(source)
        loop.train()
        loop.call()
        loop.work(1)
    rows = loop.finished()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        phases = [row[f"{name}_ns"] for name in ("data_wait", "forward", "backward", "optimizer", "explicit")]
        assert phases == [3, 5, 7, 2, 4]
        assert row["samples"] == 8
    lengths = [row["ended_at_ns"] - row["started_at_ns"] for row in rows]
    assert lengths == [22, 22, 22, 21]  # the last one ends with the last thing that belongs to it


def test_a_collective_inside_a_forward_is_not_forward() -> None:
    loop, source = Loop(), Source()
    loop.fetch(source)
    loop.steps.trains(loop._now())
    loop.watch.enter(FORWARD, loop._now())
    loop.work(2)
    loop.call(6)
    loop.work(1)
    loop.watch.leave(loop._now())
    loop.backward()
    loop.step()
    (row,) = loop.finished()
    assert (row["forward_ns"], row["explicit_ns"]) == (3, 6)


def test_micro_batches_make_one_step() -> None:
    loop, source = Loop(), Source()
    for _ in range(3):
        for _ in range(4):
            loop.fetch(source)
            loop.forward()
            loop.backward()
        loop.step()
    rows = loop.finished()
    assert [(row["micro_batches"], row["samples"], row["data_wait_ns"]) for row in rows] == [(4, 32, 12)] * 3


def test_optimizers_that_alternate_in_an_iteration_make_one_step() -> None:
    loop, source = Loop(), Source()
    for _ in range(3):
        loop.fetch(source)
        loop.train(optimizer=1)
        loop.train(optimizer=2)
    assert loop.lengths() == [31, 31, 31]
    assert loop.phases("optimizer_ns") == [4, 4, 4]


def test_without_a_loader_a_step_begins_with_its_forward() -> None:
    loop = Loop()
    for _ in range(3):
        loop.work(6)
        loop.train()
    assert loop.lengths() == [20, 20, 14]
    assert loop.phases("forward_ns") == [5, 5, 5]


def test_optimizers_that_alternate_without_a_loader_make_one_step() -> None:
    loop = Loop()
    for _ in range(3):
        loop.train(optimizer=1)
        loop.work(1)
        loop.train(optimizer=2)
    assert loop.phases("optimizer_ns") == [4, 4, 4]
    assert loop.phases("micro_batches") == [2, 2, 2]


def test_an_optimizer_that_calls_forward_and_backward_itself() -> None:
    loop = Loop()
    for _ in range(3):
        loop.watch.enter(OPTIMIZER, loop._now())
        for _ in range(2):
            loop.forward()
            loop.backward()
        loop.work(2)
        loop.watch.leave(loop._now())
        loop.steps.optimizer_stepped(1, loop._now())
    rows = loop.finished()
    assert [(row["forward_ns"], row["backward_ns"], row["optimizer_ns"]) for row in rows] == [(10, 14, 2)] * 3


def test_evaluation_and_saving_between_steps_belong_to_none() -> None:
    loop, training, validation = Loop(), Source(), Source()
    for _ in range(2):
        for _ in range(2):
            loop.fetch(training)
            loop.train()
        loop.exhaust(training)
        for _ in range(3):
            loop.fetch(validation, 50, recording=False)
            loop.evaluate(100)
        loop.exhaust(validation)
        loop.save(500)
    assert loop.lengths() == [17] * 4
    assert loop.phases("samples") == [8] * 4


def test_evaluation_in_the_middle_of_a_pass_is_a_pause() -> None:
    loop, training, validation = Loop(), Source(), Source()
    for _ in range(3):
        loop.fetch(training)
        loop.train()
        loop.fetch(validation, 50)  # gradients are only switched off around the forward
        loop.evaluate(100)
    assert loop.lengths() == [17] * 3
    assert loop.phases("data_wait_ns") == [3] * 3


def test_a_look_at_the_validation_data_before_training_is_no_step() -> None:
    loop, training, validation = Loop(), Source(), Source()
    for _ in range(2):
        loop.fetch(validation, 50, recording=False)
        loop.evaluate(100)
    for _ in range(2):
        loop.fetch(training)
        loop.train()
    assert loop.lengths() == [17, 17]
    assert not validation.trained


def test_two_loaders_in_step_begin_with_the_first_fetch() -> None:
    loop, one, other = Loop(), Source(), Source()
    for _ in range(3):
        loop.fetch(one, 3)
        loop.fetch(other, 4)
        loop.train()
    assert loop.phases("data_wait_ns") == [7] * 3


def test_a_batch_that_is_fetched_ahead_belongs_to_the_step_that_waits_for_it() -> None:
    loop, source = Loop(), Source()
    loop.fetch(source)
    for _ in range(3):
        loop.forward()
        loop.fetch(source)
        loop.backward()
        loop.step()
    assert len(loop.lengths()) == 3
    assert loop.phases("forward_ns") == [5] * 3


def test_a_new_loader_for_each_epoch_still_trains() -> None:
    loop = Loop()
    for _ in range(3):
        source = Source()
        for _ in range(2):
            loop.fetch(source)
            loop.train()
        loop.exhaust(source)
    assert loop.lengths() == [17] * 6
    assert loop.phases("data_wait_ns") == [3] * 6


def test_the_first_fetch_of_workers_that_only_start_is_left_out() -> None:
    loop, source = Loop(), Source()
    loop.fetch(source, 2_000, fresh=True)
    loop.train()
    loop.fetch(source)
    loop.train()
    assert loop.lengths() == [14, 17]
    assert loop.phases("samples") == [8, 8]


def test_an_optimizer_step_that_raised_does_not_spoil_the_next_steps() -> None:
    loop, source = Loop(), Source()
    loop.fetch(source)
    loop.forward()
    loop.backward()
    loop.watch.enter(OPTIMIZER, loop._now())  # and nobody reports its end
    loop.exhaust(source)
    for _ in range(2):
        loop.fetch(source)
        loop.train()
    assert loop.phases("optimizer_ns")[-1] == 2
    assert loop.phases("forward_ns")[-1] == 5


def test_what_the_logger_measured_goes_to_the_step_of_its_backward() -> None:
    loop, source = Loop(), Source()
    for number in range(3):
        loop.fetch(source)
        loop.forward()
        if number:  # it is told in the forward after
            ready_ns = loop.steps._held[-1].ended_ns + offset_ns() - 5 * MS
            loop.steps.sampled(number * MS, 2 * number * MS, ready_ns, ready_ns + MS)
        loop.backward()
        loop.step()
    rows = loop.finished()
    assert [(row["exposed_ns"], row["window_ns"]) for row in rows[:2]] == [(1, 2), (2, 4)]
    assert rows[2]["exposed_ns"] < 0


def test_of_several_backwards_each_step_keeps_when_another_met_the_ranks_and_what_all_of_them_exposed() -> None:
    loop, source = Loop(), Source()
    for _ in range(4):
        loop.fetch(source)
        loop.forward()
        began_ns = loop.steps._began_ns + offset_ns()
        for at_ms, exposed_ms in ((8, 2), (4, 1)):  # whichever is told first
            loop.steps.sampled(exposed_ms * MS, MS, began_ns + at_ms * MS, began_ns + (at_ms + exposed_ms) * MS)
        loop.backward()
        loop.step()
    rows = loop.finished()
    assert [row["exposed_ns"] for row in rows] == [3] * 4
    spans = [row["reduced_at_ns"] - row["ready_at_ns"] for row in rows]
    assert spans == [2, 1, 2, 1]


class Event:
    """Stands in for a CUDA event: the device is at ``reached_ms``, and passes each event 10 ms after the one before."""

    reached_ms = 0
    made = 0

    def record(self) -> None:
        Event.made += 1
        self.at_ms = 10 * Event.made

    def query(self) -> bool:
        return self.at_ms <= Event.reached_ms

    def elapsed_time(self, other: Event) -> float:
        return float(other.at_ms - self.at_ms)


def test_times_of_the_device_are_read_when_it_has_passed_and_never_waited_for() -> None:
    for reached_ms, expected in ((1_000, [10, 20, 10]), (35, [10, -1, -1])):
        Event.made, Event.reached_ms = 0, reached_ms
        times = DeviceTimes(Event, GraphCaptures())
        for phase in (FORWARD, BACKWARD, BACKWARD, OPTIMIZER):
            times.begins(phase)
            times.ends(phase)
        assert [value // MS if value > 0 else value for value in times.durations_ns()] == expected


class Graph:
    """Stands in for ``torch.cuda.CUDAGraph``: a capture fails when any thread asks for an event meanwhile."""

    captures = False

    def capture_begin(self, pool: object = None) -> None:
        Graph.captures = True

    def capture_end(self) -> None:
        Graph.captures = False


def test_no_event_is_made_or_read_while_a_graph_is_captured(tmp_path: Path) -> None:
    class Strict(Event):
        def record(self) -> None:
            assert not Graph.captures
            super().record()

        def query(self) -> bool:
            assert not Graph.captures
            return super().query()

    class Listened(Graph):
        def capture_begin(self, pool: object = None) -> None:
            super().capture_begin(pool)

        def capture_end(self) -> None:
            super().capture_end()

    Event.made, Event.reached_ms = 0, 10_000
    captures, graph = GraphCaptures(), Listened()
    captures.listen(Journal(str(tmp_path), {"kind": "run"}), Listened)
    before = DeviceTimes(Strict, captures)
    before.begins(FORWARD)
    before.ends(FORWARD)
    within = DeviceTimes(Strict, captures)
    graph.capture_begin(pool=None)
    within.begins(FORWARD)
    within.ends(FORWARD)
    assert before.durations_ns() == within.durations_ns() == [-1, -1, -1]
    graph.capture_end()
    assert before.durations_ns()[0] > 0
    # Its capture was part of the step: what the host did then is not what the device does.
    within.begins(BACKWARD)
    within.ends(BACKWARD)
    assert within.durations_ns() == [-1, -1, -1]


def test_one_step_of_some_is_measured_on_the_device() -> None:
    loop, source = Loop(), Source()
    Event.made, Event.reached_ms = 0, 10_000
    loop.steps.make_device_times = lambda: DeviceTimes(Event, GraphCaptures())
    for _ in range(2 * MEASURED_EVERY + 2):
        loop.fetch(source)
        loop.forward()
        if loop.steps.device_times is not None:
            loop.steps.device_times.begins(BACKWARD)
            loop.steps.device_times.ends(BACKWARD)
        loop.backward()
        loop.step()
    measured = [row["step"] for row in loop.finished() if row["device_backward_ns"] >= 0]
    assert measured == [MEASURED_EVERY + 1, 2 * MEASURED_EVERY + 1]


def test_batches_that_are_passed_over_are_counted_with_the_step_that_follows() -> None:
    loop, source = Loop(), Source()
    for number in range(4):
        loop.fetch(source)
        if number == 2:
            loop.forward()  # and no backward
            loop.fetch(source)
        loop.train()
    assert loop.phases("batches") == [1, 1, 2, 1]
