"""A rank's GPU runs slower than it could.

What it finds
    In a live run: a GPU that is slowed down because it is too hot or its power supply is insufficient, in at least a
    quarter of the samples while it was busy; and one whose clock is more than 15% below that of the other ranks' GPUs
    of the same model (for 5%, `gpu-throttled = 0.95` under `[tool.ddpdoctor.thresholds]`). As advice: GPUs with a
    lowered power limit, if that costs a fifth of the clock rate.

Why it is bad
    Every step ends when its slowest rank ends: one GPU at two thirds of its clock slows down all of them, and the
    script shows nothing of it.

Example
    GPU 5 (rank 5): 91 °C, 1,110 MHz of 1,980 MHz, too hot

Remedy
    Look at the cooling and the power supply of that machine, or leave the GPU out; `nvidia-smi -q -d PERFORMANCE,CLOCK`
    shows the same figures. For a lowered limit: `nvidia-smi -pl`.

When it is wrong
    Where clocks or power limits were set on purpose. A power limit that is reached is not a finding by itself: every
    GPU that multiplies large matrices reaches it.

References
    https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.finding import Fact, Finding, Refuted, Severity

if TYPE_CHECKING:
    from ddpdoctor.checks.speed.gpus_run import Throttled
    from ddpdoctor.record.model import RunRecord

CHECK = Check(code="DDP409", name="gpu-throttled", severity={"run": Severity.WARNING}, needs=frozenset({"gpus"}))


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the GPUs that are slowed down, those with one cause together."""
    from ddpdoctor.checks.speed.gpus_run import throttled_gpus
    from ddpdoctor.diagnosis.wording import rank_list

    causes: dict[tuple[str, bool], list[Throttled]] = {}
    for slow in throttled_gpus(record):
        causes.setdefault((slow.cause, slow.harmful), []).append(slow)
    for (cause, harmful), group in causes.items():
        ranks = tuple(sorted({rank for slow in group for rank in slow.gpu.ranks}))
        subject = f"the GPU of {rank_list(ranks)}" if len(group) == 1 else f"each GPU of {rank_list(ranks)}"
        yield CHECK.finding(
            "run",
            f"{subject} {cause}",
            remedy="Look at the cooling and power of the machine, or exclude the GPU."
            if harmful
            else "Raise the limit with `nvidia-smi -pl`, if the limit is not needed.",
            what_if=("straggler=none",),
            ranks=ranks,
            evidence=tuple(Fact(text=_figures(slow), basis="run") for slow in group[:4]),
            severity=None if harmful else Severity.ADVICE,
        )


def _figures(slow: Throttled) -> str:
    whose = "the GPUs of the other ranks" if slow.peers else "at most"
    expected = f"{whose}: {slow.expected_mhz:,.0f} MHz" if slow.peers else f"{whose} {slow.expected_mhz:,.0f} MHz"
    parts = [f"GPU {slow.gpu.index}: {slow.clock_mhz:,.0f} MHz at work ({expected})"]
    if slow.temperature_c is not None:
        parts.append(f"{slow.temperature_c:.0f} °C")
    if slow.power_w is not None:
        limit = "" if slow.gpu.power_limit_w is None else f" of {slow.gpu.power_limit_w:.0f} W"
        parts.append(f"{slow.power_w:.0f} W{limit}")
    return ", ".join(parts)
