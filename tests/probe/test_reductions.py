"""How often DDP's logger is asked, by how long the steps are; the module is a stand-in, the clock is driven by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ddpdoctor.probe.live.reductions import ALWAYS_MEASURED, Reductions

MS = 1_000_000
RATE = 10
"""Of steps of 7 ms one of so many is measured."""


class Module:
    """A DDP module, as far as its reducer is concerned, and its logger."""

    device_type = "cpu"

    def __init__(self) -> None:
        self.module = SimpleNamespace(parameters=lambda: ())
        self.iteration = 0
        self.rate = 0
        self.read: list[int] = []


def iterate(step_ms: list[int], *, joined_at: int = 0) -> Module:
    """Train with steps that take so long; ``joined_at`` iterations were made before anybody looked."""
    module, moments = Module(), SimpleNamespace(keep=lambda moment: None, take_in=lambda: None)

    def logger(ddp: Module) -> dict[str, Any]:
        ddp.read.append(ddp.iteration - 1)
        return {"iteration": ddp.iteration - 1, "backward_comm_time": 1, "backward_compute_time_end": 1}

    capabilities = SimpleNamespace(read_logger=logger, set_logger_rate=lambda ddp, rate: setattr(ddp, "rate", rate))
    observer: Any = SimpleNamespace(
        moments=moments,
        steps=SimpleNamespace(sampled=None),
        course=SimpleNamespace(forward_began=lambda *arguments: None),
        journal=SimpleNamespace(guarded=lambda function, *arguments, **options: None),
    )
    reductions = Reductions(observer, None, capabilities, lambda ddp: 0, SimpleNamespace(looked=None))  # type: ignore[arg-type]
    module.iteration, now_ms = joined_at, 1_000
    for ms in step_ms:
        now_ms += ms
        module.iteration += 1
        reducer = reductions.known.get(id(module)) or reductions.meet(module)
        reductions.forward_began(reducer, True, True, now_ms * MS)
        reducer.forwards += 1
        if reducer.iterations > reducer.next_read:
            reductions.read(module, reducer, now_ms * MS)
    return module


def test_of_long_steps_the_logger_is_asked_about_each() -> None:
    module = iterate([100] * 30)
    assert module.rate == 1
    assert module.read == list(range(1, 30))


def test_of_short_steps_it_is_asked_about_some_that_all_ranks_agree_on() -> None:
    module = iterate([7] * 60)
    assert module.rate == RATE
    asked = [number for number in module.read if number > ALWAYS_MEASURED]
    assert asked == list(range(20, 60, RATE))


def test_a_rank_that_was_met_later_asks_about_the_same_iterations() -> None:
    module = iterate([7] * 60, joined_at=33)
    assert [number for number in module.read if number > 40] == list(range(50, 93, RATE))


@pytest.mark.parametrize("pause_ms", [200, 60_000])
def test_pauses_between_short_steps_do_not_make_them_long(pause_ms: int) -> None:
    module = iterate([7, 7, 7, pause_ms, 7, 7, 7, 7] * 10)
    assert module.rate == RATE
    assert len([number for number in module.read if number > ALWAYS_MEASURED]) <= 80 / RATE


def test_of_very_short_steps_fewer_are_measured() -> None:
    module = iterate([1] * 900)
    assert module.rate == 20
    assert [number for number in module.read if number > ALWAYS_MEASURED] == list(range(20, 900, 20))
