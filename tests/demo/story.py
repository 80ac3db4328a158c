"""The story of the demo: what happens to a job of 8 ranks on 8 GPUs that never ran, second by second.

A healthy start, a GPU that runs hot and makes its rank late, a loader that cannot keep up, and a rank that runs out of
batches before the others and leaves them waiting. Every number follows from the elapsed time and the seed.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

RANKS = 8
SLOW_RANK = 5
"""Its GPU runs hot in the second act."""
SHORT_RANK = 3
"""It has one batch less than the others."""
BATCH_SIZE = 64
LAST_COMMON_STEP = 4_312
NS = 1_000_000_000
RAMP_S = 1.5
"""How long the figures, means of the newest seconds, take from one act to the next."""


class Act(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the story; milliseconds a step."""

    name: str
    starts_s: float
    data_ms: float = 3.1
    forward_ms: float = 58.0
    backward_ms: float = 104.0
    transfer_ms: float = 7.2
    explicit_ms: float = 0.6
    optimizer_ms: float = 9.3
    other_ms: float = 2.2
    slow_factor: float = 1.0
    """How much longer the slow rank computes."""


ACTS = (
    Act(name="healthy", starts_s=float("-inf")),
    Act(name="straggler", starts_s=4.0, slow_factor=1.52),
    Act(name="input-bound", starts_s=18.0, data_ms=97.0),
    Act(name="recovered", starts_s=32.0),
)
HANG_S = 38.0
"""When the short rank leaves its loop."""
NOTICED_S = 2.0
"""From the beginning of a standstill to its verdict."""
JUDGED_S = 2.5
"""From the beginning of an act to its findings, and from its end to theirs."""


class RankTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds a step of one rank; together they are the step."""

    data: float
    forward: float
    backward: float
    waiting: float
    transfer: float
    explicit: float
    optimizer: float
    other: float

    @property
    def step(self) -> float:
        """The whole step."""
        times: tuple[float, ...] = msgspec.structs.astuple(self)
        return sum(times)


def noise(seed: int, *where: int) -> float:
    """A number from -1 to 1 that depends on nothing but its arguments."""
    mixed = seed & 0xFFFFFFFF
    for value in where:
        mixed = (mixed ^ (value & 0xFFFFFFFF)) * 0x9E3779B1 & 0xFFFFFFFF
        mixed ^= mixed >> 15
        mixed = mixed * 0x85EBCA6B & 0xFFFFFFFF
        mixed ^= mixed >> 13
    return mixed / 0x7FFFFFFF - 1.0


def act_at(elapsed_s: float) -> Act:
    """The act that is on."""
    return next(act for act in reversed(ACTS) if elapsed_s >= act.starts_s)


@lru_cache(maxsize=4_096)
def times_at(second: int, seed: int) -> tuple[RankTimes, ...]:
    """What a step takes on each rank in one second of the story."""
    busy, data, act = [], [], _blended(second)
    for rank in range(RANKS):
        factor = (act.slow_factor if rank == SLOW_RANK else 1.0) * (1 + 0.006 * noise(seed, second, rank))
        busy.append((act.forward_ms * factor, act.backward_ms * factor))
        data.append(act.data_ms * (1 + 0.04 * noise(seed, second, rank, 7)))
    arrivals = [data[rank] + sum(busy[rank]) for rank in range(RANKS)]
    last = max(arrivals)
    return tuple(
        RankTimes(
            data=data[rank],
            forward=busy[rank][0],
            backward=busy[rank][1],
            waiting=last - arrivals[rank],
            transfer=act.transfer_ms * (1 + 0.03 * noise(seed, second, 11)),
            explicit=act.explicit_ms,
            optimizer=act.optimizer_ms,
            other=act.other_ms,
        )
        for rank in range(RANKS)
    )


def steps_at(elapsed_s: float, seed: int) -> float:
    """Steps made, as a number that grows evenly within a second; stands still from the hang on."""
    end_s = min(elapsed_s, HANG_S)
    whole = int(end_s // 1)
    made = LAST_COMMON_STEP - sum(_rate(second, seed) for second in range(whole, int(HANG_S)))
    return made + (end_s - whole) * _rate(whole, seed) if end_s < HANG_S else float(LAST_COMMON_STEP)


@lru_cache(maxsize=4_096)
def _rate(second: int, seed: int) -> float:
    return 1_000.0 / max(times.step for times in times_at(second, seed))


@lru_cache(maxsize=4_096)
def _blended(second: int) -> Act:
    """The act of a second, blended with the one before while the figures catch up."""
    now, before = act_at(second), act_at(second - RAMP_S)
    if now is before:
        return now
    weight = min(1.0, (second + 1 - now.starts_s) / (RAMP_S + 1))
    return msgspec.structs.replace(
        now,
        data_ms=before.data_ms + weight * (now.data_ms - before.data_ms),
        slow_factor=before.slow_factor + weight * (now.slow_factor - before.slow_factor),
    )
