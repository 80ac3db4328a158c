"""GPUs that run slower than they could while they are at work, and those that mostly stand still."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

import msgspec

from ddpdoctor.diagnosis.performance.gpus import GpuUse, gpu_uses
from ddpdoctor.diagnosis.performance.summary import threshold
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.measured import HARMFUL, POWER_LIMIT, Gpu, GpuSample

WINDOW_NS = 120_000_000_000
MINIMUM_SAMPLES = 10
"""Looks at a GPU at work, one a second, before anything is said."""
AT_WORK_PERCENT = 50.0
HARMFUL_SHARE = 0.25
"""Share of the looks in which the hardware protects itself."""
HARMFUL_CLOCK = 0.95
"""A clock that is hardly lower than the highest costs nothing."""
LOWERED_LIMIT = 0.8
"""A power limit below this share of the default was set by someone …"""
LOWERED_CLOCK = 0.8
"""… and matters where the clock falls below this share of the highest."""


class Throttled(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU that is slower than it could be."""

    gpu: Gpu
    cause: str
    """In words, as a predicate: ``is too hot``."""
    harmful: bool
    """Its hardware protects itself, or it is slower than the GPUs of the other ranks; otherwise someone lowered its
    power limit."""
    clock_mhz: float
    """Median while it was at work."""
    expected_mhz: float
    """The peers' median, or its highest clock."""
    peers: bool
    """``expected_mhz`` is the clock of the other ranks' GPUs."""
    temperature_c: float | None
    power_w: float | None


def throttled_gpus(record: RunRecord) -> Iterator[Throttled]:
    """Yield the GPUs of ranks that are slowed down, by the samples of the last two minutes in which they were at work.

    A power limit alone is none: every GPU that multiplies large matrices reaches it.
    """
    at_work = [(gpu, looks) for gpu in record.gpus if gpu.ranks and len(looks := _at_work(gpu)) >= MINIMUM_SAMPLES]
    lowest = threshold(record, "gpu-throttled")
    clocks = [_clock(looks) for _, looks in at_work]
    for position, (gpu, looks) in enumerate(at_work):
        peers = [
            clock for other, clock in enumerate(clocks) if other != position and at_work[other][0].name == gpu.name
        ]
        slow = _slow(gpu, looks, clocks[position], median(peers) if peers else None, lowest)
        if slow is not None:
            yield slow


def _slow(
    gpu: Gpu, looks: Sequence[GpuSample], clock: float, peers_clock: float | None, lowest: float
) -> Throttled | None:
    """Judge one GPU; ``lowest`` is the share of the peers' clock below which its own is too low."""
    highest = float(gpu.maximum_sm_clock_mhz or 0)
    harmful = [reason for look in looks for reason in look.throttle_reasons if reason in HARMFUL]
    struck = [look for look in looks if not HARMFUL.isdisjoint(look.throttle_reasons)]
    if len(struck) >= HARMFUL_SHARE * len(looks) and _clock(struck) < HARMFUL_CLOCK * highest:
        return _throttled(gpu, struck, _cause(max(set(harmful), key=harmful.count)), highest)
    if peers_clock is not None and clock < lowest * peers_clock:
        return _throttled(gpu, looks, _usual_cause(gpu, looks), peers_clock, peers=True)
    capped = sum(POWER_LIMIT in look.throttle_reasons for look in looks) > len(looks) / 2
    if capped and _is_lowered(gpu) and clock < LOWERED_CLOCK * highest:
        return _throttled(gpu, looks, _usual_cause(gpu, looks), highest, harmful=False)
    return None


def _throttled(
    gpu: Gpu, looks: Sequence[GpuSample], cause: str, expected: float, *, peers: bool = False, harmful: bool = True
) -> Throttled:
    temperatures = [look.temperature_c for look in looks if look.temperature_c is not None]
    powers = [look.power_w for look in looks if look.power_w is not None]
    return Throttled(
        gpu=gpu,
        cause=cause,
        harmful=harmful,
        clock_mhz=_clock(looks),
        expected_mhz=expected,
        peers=peers,
        temperature_c=max(temperatures, default=None),
        power_w=median(powers) if powers else None,
    )


def _usual_cause(gpu: Gpu, looks: Sequence[GpuSample]) -> str:
    """Return what the driver mostly gives as reason."""
    reasons = [reason for look in looks for reason in look.throttle_reasons]
    if not reasons:
        return "runs at a low clock rate"
    reason = max(dict.fromkeys(reasons), key=reasons.count)
    if reason == POWER_LIMIT and _is_lowered(gpu):
        return (
            f"is held at a power limit of {gpu.power_limit_w:.0f} W, where {gpu.default_power_limit_w:.0f} W is usual"
        )
    return _cause(reason)


def _cause(reason: str) -> str:
    return f"is {reason}" if not reason.startswith(("power", "clocks")) else f"is slowed down ({reason})"


def _is_lowered(gpu: Gpu) -> bool:
    return (
        gpu.power_limit_w is not None
        and gpu.default_power_limit_w is not None
        and gpu.power_limit_w < LOWERED_LIMIT * gpu.default_power_limit_w
    )


def _at_work(gpu: Gpu) -> list[GpuSample]:
    """Return the samples of the window in which it computed and told its clock."""
    since_ns = gpu.samples[-1].taken_at_ns - WINDOW_NS if gpu.samples else 0
    return [
        sample
        for sample in gpu.samples
        if sample.taken_at_ns > since_ns
        and sample.sm_clock_mhz is not None
        and (sample.utilisation_percent is None or sample.utilisation_percent >= AT_WORK_PERCENT)
    ]


def _clock(looks: Sequence[GpuSample]) -> float:
    return float(median(look.sm_clock_mhz or 0 for look in looks))


# GPUs that compute too little for reasons that no other finding of a run speaks of.

FEWEST_LOOKS = 20
"""Looks, one a second, before anything is said."""
UNEXPLAINED_SHARE = 0.6
"""Of the time in which a GPU may compute nothing: so much at least neither data nor exposed communication explain."""


def idle_gpus(record: RunRecord) -> tuple[GpuUse, ...]:
    """Return the GPUs that compute for less of the training than they should.

    Data wait (input-bound) and exposed communication have findings of their own and are no reason here.
    """
    lowest = threshold(record, "idle-gpu")
    return tuple(
        use
        for use in gpu_uses(record)
        if use.samples >= FEWEST_LOOKS
        and use.computing_percent < 100 * lowest
        and unexplained_share(use) >= UNEXPLAINED_SHARE * (1 - lowest)
    )


def unexplained_share(use: GpuUse) -> float:
    """Share of the training in which a GPU computes nothing although its data and its gradients are there."""
    return 1 - use.computing_percent / 100 - use.data_wait_share - use.exposed_share
