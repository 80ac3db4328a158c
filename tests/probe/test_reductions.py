"""How often reductions are measured, and what the user's logger sees of it; module and clock are stand-ins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ddpdoctor.probe.live.reductions import ALWAYS_MEASURED, TORCHS_OWN_RATE, Reductions

MS = 1_000_000
RATE = 10
"""Of steps of 7 ms one of so many is measured."""


class Reducer:
    """Torch's, as far as it counts and measures."""

    def __init__(self, iterations: int, rate: int) -> None:
        self.iterations, self.rate = iterations, rate
        self.reduced_ns = 0

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        self.rate = rate

    def measures(self) -> bool:
        return self.iterations > 0 and (self.iterations <= ALWAYS_MEASURED or self.iterations % self.rate == 0)

    def reduce(self) -> None:
        if self.measures():
            self.reduced_ns = self.iterations * MS


class Logger:
    """Torch's: it takes in an iteration where the rate says so as the next begins."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self.taken_in: list[int] = []
        self.ints_map: dict[str, int] = {}
        self.strs_map: dict[str, str] = {}

    def set_runtime_stats_and_log(self) -> None:
        if self._reducer.measures():
            self.taken_in.append(self._reducer.iterations)
            self.ints_map = {
                "iteration": self._reducer.iterations,
                "backward_comm_time": 1,
                "backward_compute_time_end": 1,
                "backward_comm_time_end": self._reducer.reduced_ns,
            }

    def _get_ddp_logging_data(self) -> Logger:
        return self


class Module:
    """A DDP module."""

    device_type = "cpu"

    def __init__(self, iterations: int, rate: int) -> None:
        self.module = SimpleNamespace(parameters=lambda: ())
        self.reducer = Reducer(iterations, rate)
        self.logger = Logger(self.reducer)


class Job:
    """A training whose rate of the logger the user has set before we looked; by default there was none to set it."""

    def __init__(self, *, joined_at: int = 0, rate: int = TORCHS_OWN_RATE) -> None:
        self.module = Module(joined_at, rate)
        self.measured: list[int] = []
        """Iterations whose reductions we have measured."""
        self.seen_rates: set[int] = set()
        """Rates that other code meets outside of what is measured."""
        self._now_ms = 1_000
        torch: Any = SimpleNamespace(
            distributed=SimpleNamespace(
                Reducer=Reducer, get_debug_level=lambda: 0, DebugLevel=SimpleNamespace(DETAIL=2)
            )
        )
        capabilities: Any = SimpleNamespace(
            make_logger=Logger, set_logger_rate=Reducer.__dict__["_set_ddp_runtime_logging_sample_rate"]
        )
        observer: Any = SimpleNamespace(
            moments=SimpleNamespace(keep=lambda moment: self.measured.append(moment[4] // MS), take_in=lambda: None),
            steps=SimpleNamespace(sampled=None),
            course=SimpleNamespace(forward_began=lambda *arguments: None),
            journal=SimpleNamespace(guarded=lambda function, *arguments, **options: function(*arguments)),
        )
        searches: Any = SimpleNamespace(looked=lambda *arguments: None)
        seen_when_made = not joined_at
        number = 0 if seen_when_made else None
        self.reductions = Reductions(observer, torch, capabilities, lambda ddp: number, searches)
        self.reductions.install()

    def train(self, step_ms: list[int], *, backwards: bool = True) -> Job:
        """Make steps that take so long."""
        module, reductions = self.module, self.reductions
        for ms in step_ms:
            self._now_ms += ms
            reducer = reductions.known.get(id(module)) or reductions.meet(module)
            reductions.forward_began(reducer, True, True, self._now_ms * MS)
            reducer.forwards += 1
            if reducer.is_measured:
                reductions.read(module, reducer)
            self.seen_rates.add(module.reducer.rate)
            module.logger.set_runtime_stats_and_log()
            module.reducer.iterations += 1
            if reducer.iterations >= reducer.next_measured:
                reductions.measure(module, reducer, self._now_ms * MS)
            if backwards:
                module.reducer.reduce()
                if reductions.raised:
                    reductions.backward_is_over()
                self.seen_rates.add(module.reducer.rate)
        return self


@pytest.fixture(autouse=True)
def _torchs_own_again(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Reducer.__dict__["_set_ddp_runtime_logging_sample_rate"]
    monkeypatch.setattr(Reducer, "_set_ddp_runtime_logging_sample_rate", own)
    monkeypatch.setattr("ddpdoctor.probe.live.reductions._since_epoch", lambda time_ns: time_ns)


def users_iterations(rate: int, until: int) -> list[int]:
    """What the user's logger takes in when nobody else is there."""
    return [number for number in range(1, until) if number <= ALWAYS_MEASURED or number % rate == 0]


def test_of_long_steps_each_is_measured() -> None:
    assert Job().train([100] * 30).measured == list(range(1, 30))


def test_of_short_steps_some_are_measured_that_all_ranks_agree_on() -> None:
    measured = Job().train([7] * 60).measured
    assert [number for number in measured if number > ALWAYS_MEASURED] == list(range(20, 60, RATE))


def test_a_rank_that_was_met_later_measures_the_same_iterations_once_the_users_rate_is_known() -> None:
    job = Job(joined_at=33, rate=15).train([7] * 60)
    assert job.measured[:2] == [45, 60]
    assert [number for number in job.measured if number > 60] == list(range(70, 93, RATE))
    assert job.module.logger.taken_in == [45, 60, 75, 90]


@pytest.mark.parametrize("pause_ms", [200, 60_000])
def test_pauses_between_short_steps_do_not_make_them_long(pause_ms: int) -> None:
    measured = Job().train([7, 7, 7, pause_ms, 7, 7, 7, 7] * 10).measured
    assert len([number for number in measured if number > ALWAYS_MEASURED]) <= 80 / RATE


def test_of_very_short_steps_fewer_are_measured() -> None:
    measured = Job().train([1] * 900).measured
    assert [number for number in measured if number > ALWAYS_MEASURED] == list(range(20, 900, 20))


@pytest.mark.parametrize("step_ms", [1, 7, 100])
@pytest.mark.parametrize("rate", [None, 1, 2, 7])
def test_the_users_logger_takes_in_what_it_would_without_us(rate: int | None, step_ms: int) -> None:
    job = Job()
    if rate is not None:
        job.module.reducer._set_ddp_runtime_logging_sample_rate(rate)
    job.train([step_ms] * 250)
    assert job.module.logger.taken_in == users_iterations(rate or TORCHS_OWN_RATE, 250)
    assert job.seen_rates == {rate or TORCHS_OWN_RATE}
    assert len(job.measured) > 10


def test_a_rate_that_is_set_while_a_backward_is_measured_holds_from_then_on() -> None:
    job = Job().train([100] * 3).train([100], backwards=False)
    assert job.reductions.raised
    job.module.reducer._set_ddp_runtime_logging_sample_rate(4)
    assert job.module.reducer.rate == 4
    job.module.reducer.reduce()
    job.train([100] * 30)
    assert job.module.logger.taken_in == users_iterations(4, 34)
    assert 4 not in job.measured and {3, 5, 6} <= set(job.measured)


def test_a_forward_without_a_backward_measures_nothing_anew() -> None:
    job = Job().train([100] * 20).train([100] * 2, backwards=False).train([100] * 3)
    assert job.measured == [*range(1, 21), 23, 24]


def test_a_module_that_is_gone_is_forgotten_with_its_reducer() -> None:
    job = Job().train([100] * 20).train([100], backwards=False)
    reductions = job.reductions
    assert reductions._loggers and reductions.raised and len(reductions._users_rates) == 1
    del job.module
    assert not (reductions._loggers or reductions.raised or reductions.known or len(reductions._users_rates))
