"""How fast the screen answers of a job of 4,096 ranks on 512 nodes: from a key to the drawn page.

``python -m tests.benchmarks.many_ranks_cost [--svg FILE]`` presses the keys of the pages in the real application (no
terminal behind it) and prints the median and the longest time of each, and its CPU time. It exits with 1 when a median
of the CPU times is above 200 ms: on a busy machine the other says nothing. With ``--svg`` it draws the page of ranks.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path

import msgspec

from ddpdoctor.monitor.snapshot import Snapshot
from tests.tui import runs
from tests.tui.screens import UTF8, opened

RANKS, RANKS_OF_A_NODE = 4096, 8
BOUND_S = 0.2
TIMES = 7
KEYS = (("1", "overview"), ("2", "ranks"), ("down", "ranks: the next row"), ("5", "findings"), ("s", "ranks: sorted"))


def big_run(ranks: int = RANKS) -> Snapshot:
    """A job with a slow rank that is to blame, a slow node, five nodes with a late rank each, and a rank that died."""
    base = runs.many_ranks(ranks)
    blamed = ranks * 5 // 8

    def changed(number: int) -> dict[str, object]:
        step = 180.0 * runs.MS
        if number == blamed:
            return {"lateness_ns": (80.0 * runs.MS,) * 200}
        if number // RANKS_OF_A_NODE == 3:
            return {"lateness_ns": (0.1 * step,) * 200}
        if number == 30 * RANKS_OF_A_NODE + 2:
            return {"alive": False, "state": "killed by SIGKILL"}
        if number // RANKS_OF_A_NODE % 97 == 40 and number % RANKS_OF_A_NODE == 5:
            return {"lateness_ns": (0.04 * step,) * 200}
        return {}

    rows = tuple(msgspec.structs.replace(rank, **changed(rank.rank)) for rank in base.ranks)
    return msgspec.structs.replace(base, ranks=rows)


async def _measured(snapshot: Snapshot, svg: str | None) -> dict[str, list[tuple[float, float]]]:
    taken: dict[str, list[tuple[float, float]]] = {}
    async with opened(runs.Still(snapshot), size=(160, 50), environment=UTF8) as (app, pilot):
        for _ in range(TIMES):
            for key, what in KEYS:
                if key == "s":
                    await pilot.press("2")
                began_s, began_cpu_s = time.perf_counter(), time.process_time()
                await pilot.press(key)
                times = (time.perf_counter() - began_s, time.process_time() - began_cpu_s)
                taken.setdefault(what, []).append(times)
                if key == "2" and svg is not None:
                    await pilot.pause()
                    Path(svg).write_text(app.export_screenshot(), encoding="utf-8")
                    svg = None
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.many_ranks_cost")
    parser.add_argument("--svg", metavar="FILE")
    taken = asyncio.run(_measured(big_run(), parser.parse_args().svg))
    slow = False
    for what, times in taken.items():
        seconds, cpu_s = zip(*times, strict=True)
        slow |= statistics.median(cpu_s) > BOUND_S
        print(
            f"{what:<24} {statistics.median(seconds) * 1000:5.0f} ms, at most {max(seconds) * 1000:5.0f} ms; "
            f"CPU {statistics.median(cpu_s) * 1000:5.0f} ms"
        )
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
