"""GPUs that run slower than they could while they are at work, and those that mostly stand still."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from ddpdoctor.check import Verdict
from ddpdoctor.diagnosis.performance.gpus import GpuUse, gpu_uses
from ddpdoctor.diagnosis.performance.summary import threshold
from ddpdoctor.diagnosis.wording import rank_list
from ddpdoctor.finding import Severity
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


def throttled_gpus(record: RunRecord) -> Iterator[Verdict]:
    """Yield the GPUs of ranks that are slowed down, by the samples of the last two minutes in which they were at work.

    Those with one cause together. A power limit alone is none: every GPU that multiplies large matrices reaches it.
    """
    at_work = [(gpu, looks) for gpu in record.gpus if gpu.ranks and len(looks := _at_work(gpu)) >= MINIMUM_SAMPLES]
    lowest = threshold(record, "gpu-throttled")
    clocks = [_clock(looks) for _, looks in at_work]
    causes: dict[tuple[str, bool], list[tuple[Gpu, str]]] = {}
    for position, (gpu, looks) in enumerate(at_work):
        peers = [
            clock for other, clock in enumerate(clocks) if other != position and at_work[other][0].name == gpu.name
        ]
        slow = _slow(gpu, looks, clocks[position], median(peers) if peers else None, lowest)
        if slow is not None:
            cause, harmful, figures = slow
            causes.setdefault((cause, harmful), []).append((gpu, figures))
    for (cause, harmful), group in causes.items():
        ranks = tuple(sorted({rank for gpu, _ in group for rank in gpu.ranks}))
        subject = f"the GPU of {rank_list(ranks)}" if len(group) == 1 else f"each GPU of {rank_list(ranks)}"
        yield Verdict(
            sentence=f"{subject} {cause}",
            remedy="Look at the cooling and power of the machine, or exclude the GPU."
            if harmful
            else "Raise the limit with `nvidia-smi -pl`, if the limit is not needed.",
            what_if=("straggler=none",),
            ranks=ranks,
            because=tuple((figures, None) for _, figures in group[:4]),
            severity=None if harmful else Severity.ADVICE,
        )


def _slow(
    gpu: Gpu, looks: Sequence[GpuSample], clock: float, peers_clock: float | None, lowest: float
) -> tuple[str, bool, str] | None:
    """Return the cause, whether it does harm, and figures; ``lowest`` is the share of the peers' clock that is enough.

    It does no harm where someone only lowered the power limit.
    """
    highest = float(gpu.maximum_sm_clock_mhz or 0)
    at_most = f"at most {highest:,.0f} MHz"
    harmful = [reason for look in looks for reason in look.throttle_reasons if reason in HARMFUL]
    struck = [look for look in looks if not HARMFUL.isdisjoint(look.throttle_reasons)]
    if len(struck) >= HARMFUL_SHARE * len(looks) and _clock(struck) < HARMFUL_CLOCK * highest:
        return _cause(max(set(harmful), key=harmful.count)), True, _figures(gpu, struck, at_most)
    if peers_clock is not None and clock < lowest * peers_clock:
        peers = f"the GPUs of the other ranks: {peers_clock:,.0f} MHz"
        return _usual_cause(gpu, looks), True, _figures(gpu, looks, peers)
    capped = sum(POWER_LIMIT in look.throttle_reasons for look in looks) > len(looks) / 2
    if capped and _is_lowered(gpu) and clock < LOWERED_CLOCK * highest:
        return _usual_cause(gpu, looks), False, _figures(gpu, looks, at_most)
    return None


def _figures(gpu: Gpu, looks: Sequence[GpuSample], expected: str) -> str:
    parts = [f"GPU {gpu.index}: {_clock(looks):,.0f} MHz at work ({expected})"]
    temperatures = [look.temperature_c for look in looks if look.temperature_c is not None]
    if temperatures:
        parts.append(f"{max(temperatures):.0f} °C")
    powers = [look.power_w for look in looks if look.power_w is not None]
    if powers:
        limit = "" if gpu.power_limit_w is None else f" of {gpu.power_limit_w:.0f} W"
        parts.append(f"{median(powers):.0f} W{limit}")
    return ", ".join(parts)


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


def idle_gpus(record: RunRecord) -> Iterator[Verdict]:
    """Yield the GPUs that compute for less of the training than they should, all as one.

    Data wait (input-bound) and exposed communication have findings of their own and are no reason here.
    """
    lowest = threshold(record, "idle-gpu")
    idle = [
        use
        for use in gpu_uses(record)
        if use.samples >= FEWEST_LOOKS
        and use.computing_percent < 100 * lowest
        and _unexplained_share(use) >= UNEXPLAINED_SHARE * (1 - lowest)
    ]
    if not idle:
        return
    idle.sort(key=lambda use: use.computing_percent)
    ranks = sorted({rank for use in idle for rank in use.ranks})
    worst, best = idle[0].computing_percent, idle[-1].computing_percent
    figure = f"{worst:.0f}%" if round(worst) == round(best) else f"{worst:.0f} to {best:.0f}%"
    compute = "GPU of {} computes" if len(idle) == 1 else "GPUs of {} compute"
    facts = []
    for use in idle[:4]:
        busy = f"the driver reads {use.utilisation_percent:.0f}%"
        if use.utilisation_percent - use.computing_percent >= 1:
            busy += f", of which {use.utilisation_percent - use.computing_percent:.0f}% is communication kernels alone"
        facts.append(
            f"GPU {use.index} ({rank_list(use.ranks)}): {busy}; of a step of {use.step_ns / 1e6:.1f} ms,"
            f" {use.data_wait_share:.0%} waits for data, {use.exposed_share:.0%} is exposed communication,"
            f" {use.explicit_share:.0%} explicit collectives"
        )
    yield Verdict(
        sentence=f"the {compute.format(rank_list(ranks))} for {figure} of the training",
        remedy="Make larger batches or use torch.compile, and take .item(), printing and other CPU work out of the"
        " loop.",
        ranks=tuple(ranks),
        because=tuple((text, None) for text in facts),
    )


def _unexplained_share(use: GpuUse) -> float:
    """Share of the training in which a GPU computes nothing although its data and its gradients are there."""
    return 1 - use.computing_percent / 100 - use.data_wait_share - use.exposed_share
