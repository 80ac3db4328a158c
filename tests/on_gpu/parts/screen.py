"""The page of the GPUs, drawn from real samples, and what stands there for a figure that the driver does not give."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from ddpdoctor.metrics import FAMILIES
from ddpdoctor.record.streams.measured import Gpu, GpuSample
from ddpdoctor.record.writer import epoch_ns
from ddpdoctor.tui.draw.figures import UNKNOWN, degrees, three, watts
from tests.gpu.machine import HEALTHY, build_library, machine
from tests.on_gpu.claims import Bench, Claim
from tests.on_gpu.parts.nvml import sampling
from tests.tui import runs
from tests.tui.screens import opened, text_of

LIMIT_S = 45.0
OPTIONAL = ("ecc_errors", "memory_used_bytes", "power_w", "sm_clock_mhz", "temperature_c", "utilisation_percent")
CLAIMS = {
    "fields": Claim("a sample of this card has all figures, or says that they are unknown",
                    "none is missing but ECC", pretends=True),
    "page": Claim("the page shows name, power, clock and temperature of each GPU", "as sampled", pretends=True),
    "unknown": Claim("a figure that the driver does not give is a dash, and no 0", "dashes", pretends=True),
    "metrics": Claim("a figure that the driver does not give has no sample for Prometheus", "none", pretends=True),
    "lost": Claim("a GPU that is lost while it is sampled is said to be lost", "lost, its figures unknown",
                  pretends=True),
}  # fmt: skip


def measure(bench: Bench) -> None:
    """Judge the claims."""
    with _gpus(bench) as (gpus, lost):
        missing = [name for name in OPTIONAL if any(getattr(gpu.samples[-1], name) is None for gpu in gpus)]
        bench.judge("fields", set(missing) <= {"ecc_errors"}, f"unknown: {', '.join(missing) or 'none'}")
        svg, page = asyncio.run(_drawn(gpus))
        (bench.folder / "gpus.svg").write_text(svg, encoding="utf-8")
        words = [word for gpu in gpus for word in (gpu.name, *_figures(gpu.samples[-1]))]
        absent = [word for word in words if word not in page]
        bench.judge("page", not absent, "gpus.svg", note=f"not on it: {absent}" if absent else "")
        bare = tuple(
            msgspec.structs.replace(gpu, samples=(GpuSample(taken_at_ns=epoch_ns()),), power_limit_w=None)
            for gpu in gpus
        )
        _, page = asyncio.run(_drawn(bare))
        rows = [
            line for line in page.splitlines() if line.strip(" │|").startswith(("busy", "memory", "power", "clock"))
        ]
        figures = [row.strip(" │|").split()[1] for row in rows]
        bench.judge("unknown", bool(figures) and set(figures) == {UNKNOWN}, " ".join(figures))
        snapshot = msgspec.structs.replace(runs.snapshot(), gpus=bare)
        told = ("ddpdoctor_gpu_lost", "ddpdoctor_gpu_memory_bytes")  # What is known of any GPU.
        figures_of_gpu = [one for one in FAMILIES if one.name.startswith("ddpdoctor_gpu_") and one.name not in told]
        served = [family.name for family in figures_of_gpu if [*family.samples(snapshot)]]
        bench.judge("metrics", not served, ", ".join(served) or "none")
        if lost is None:
            bench.leave_out("lost", "no GPU is taken away for this")
        else:
            bench.judge("lost", lost.lost and lost.utilisation_percent is None, f"lost: {lost.lost}")


@contextmanager
def _gpus(bench: Bench) -> Iterator[tuple[tuple[Gpu, ...], GpuSample | None]]:
    """Yield GPUs with samples; and the sample of one that was lost, where it can be pretended."""
    if bench.pretends:
        with machine(build_library(bench.folder), bench.folder, HEALTHY) as asked:
            gpus = asked.sampled().gpus
            asked.becomes(HEALTHY | {"gpu1.lost": "1"})
            yield gpus, asked.wait_until(lambda look: look.newest(1).lost).newest(1)
        return
    with sampling() as sampled:
        time.sleep(3)
        yield sampled(), None


async def _drawn(gpus: tuple[Gpu, ...]) -> tuple[str, str]:
    """Return the page as a picture and as text."""
    now_ns = epoch_ns()
    snapshot = msgspec.structs.replace(runs.snapshot(), gpus=gpus, gpus_note="", measured_at_ns=now_ns)
    async with opened(runs.Still(snapshot), size=(160, 40)) as (app, pilot):
        await pilot.press("4")
        await pilot.pause()
        return app.export_screenshot(), text_of(app)


def _figures(sample: GpuSample) -> Iterator[str]:
    """Yield figures as the page writes them."""
    yield from (three(sample.sm_clock_mhz), degrees(sample.temperature_c), watts(sample.power_w))
