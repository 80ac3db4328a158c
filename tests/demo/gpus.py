"""The GPUs of the demo: what a driver would have said of them."""

from __future__ import annotations

from functools import lru_cache

from ddpdoctor.record.streams.measured import Gpu, GpuSample
from tests.demo.story import HANG_S, NS, RANKS, SLOW_RANK, act_at, noise

GIB = 2**30
SAMPLES = 120
"""Samples that are kept of a GPU, one a second."""


def gpus_at(elapsed_s: float, started_at_ns: int, seed: int) -> tuple[Gpu, ...]:
    """Every GPU with its newest samples; ``started_at_ns`` is the beginning of the story."""
    second = int(elapsed_s // 1)
    return tuple(
        Gpu(
            index=index,
            uuid=f"GPU-{0x5D0C70 + index * 0x1F31:08x}",
            name="NVIDIA H100 80GB HBM3",
            memory_total_bytes=80 * GIB - 480 * 2**20,
            power_limit_w=700.0,
            maximum_sm_clock_mhz=1_980,
            ranks=(index,),
            samples=tuple(
                _sample(index, past, started_at_ns, seed) for past in range(second - SAMPLES + 1, second + 1)
            ),
        )
        for index in range(RANKS)
    )


@lru_cache(maxsize=8_192)
def _sample(index: int, second: int, started_at_ns: int, seed: int) -> GpuSample:
    act = act_at(second)
    shaken = noise(seed, index, second, 3)
    hot = index == SLOW_RANK and act.name == "straggler"
    if second >= HANG_S:
        # A GPU that spins in a collective reads 100 % and draws little.
        use, power, clock = 100.0, 238 + 4 * shaken, 1_980
    elif act.name == "input-bound":
        use, power, clock = 61 + 4 * shaken, 402 + 14 * shaken, 1_980
    else:
        use, power, clock = 97 + 2 * shaken, 611 + 16 * shaken, 1_980
    if hot:
        power, clock = 434 + 9 * shaken, 1_155 + int(30 * shaken)
    warmth = 21 * min(1.0, (second - act.starts_s + 4) / 6) if hot else 0
    return GpuSample(
        taken_at_ns=started_at_ns + second * NS,
        utilisation_percent=max(0.0, min(100.0, round(use))),
        memory_used_bytes=int((61.3 + 0.2 * (index % 3)) * GIB),
        temperature_c=round(66 + 1.2 * (index % 4) + warmth + shaken),
        power_w=round(power, 1),
        sm_clock_mhz=clock,
        throttle_reasons=("thermal slowdown",) if hot else (),
        ecc_errors=0,
        processes=((21_840 + index, int(60.7 * GIB)),),
    )
