"""What the screen costs: share of a core and memory, in a real terminal, on runs of 8 and of 512 ranks.

``python -m tests.benchmarks.screen_cost`` shows each run for 15 s on the overview and on the table of ranks and prints
CPU time, the drawing of the terminal's commands included, the making of the snapshots not; it exits with 1 when 8 ranks
cost more than 5 % of a core, 512 more than 15 %, or memory grows by more than 10 MB meanwhile.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec
import psutil

from ddpdoctor.monitor.snapshot import Snapshot
from tests.tui import runs
from tests.tui.terminals import Terminal

BOUNDS = {8: 0.05, 512: 0.15}
"""Share of a core by number of ranks."""
GROWTH_BYTES = 10_000_000
SECONDS = 15.0
ROOT = Path(__file__).parents[2]
PREPARED = 16
"""Snapshots that are shown in turn, each with other figures in every row."""


class Turning(runs.Still):
    """Shows prepared snapshots in turn, a new one each time, with a clock that goes on."""

    def __init__(self, ranks: int) -> None:
        self._prepared = [_moment(ranks, number) for number in range(PREPARED)]
        self._asked = 0
        super().__init__(self._prepared[0])

    def snapshot(self) -> Snapshot:
        self._asked += 1
        passed_ns = self._asked * runs.S // 2
        return msgspec.structs.replace(
            self._prepared[self._asked % PREPARED],
            now_ns=runs.NOW + passed_ns,
            measured_at_ns=runs.NOW + passed_ns - 200 * runs.MS,
            steps=1_234 + 3 * self._asked,
        )


def _moment(ranks: int, number: int) -> Snapshot:
    base = runs.straggler() if ranks == 8 else runs.many_ranks(ranks)
    changed = tuple(
        msgspec.structs.replace(
            rank,
            state=("computing (backward)", "computing (forward)", "waiting in all_reduce")[(number + rank.rank) % 3],
            state_since_ns=None,
            step=1_234 + 3 * number,
            waiting_ns=(80 + (number * 7 + rank.rank) % 10) * 1e6,
            lateness_ns=rank.lateness_ns[number:] + rank.lateness_ns[:number],
            measured_at_ns=None,
            beat_at_ns=None,
        )
        for rank in base.ranks
    )
    return msgspec.structs.replace(base, ranks=changed, steps_per_s=3.5 + number / 50)


def main() -> int:
    """Print the table; 1 when a bound is exceeded."""
    exceeded = False
    for ranks, bound in BOUNDS.items():
        terminal = Terminal(("tests.benchmarks.screen_cost", str(ranks)), {"PYTHONPATH": str(ROOT)}, ROOT)
        try:
            terminal.resize(160, 50)
            terminal.until("Vital signs")
            process = psutil.Process(terminal.process.pid)
            for key, page in (("1", "overview"), ("2", "ranks")):
                terminal.send(key)
                time.sleep(3)
                share, grown = _measured(process)
                exceeded |= share > bound or grown > GROWTH_BYTES
                print(
                    f"{ranks:>4} ranks, {page:<9} {share:6.1%} of a core (at most {bound:.0%}),"
                    f" {process.memory_info().rss / 1e6:.0f} MB, {grown / 1e6:+.1f} MB meanwhile",
                    flush=True,
                )
        finally:
            terminal.process.kill()
            terminal.process.wait()
    return int(exceeded)


def _measured(process: psutil.Process) -> tuple[float, int]:
    before, held, began = process.cpu_times(), process.memory_info().rss, time.perf_counter()
    time.sleep(SECONDS)
    after, seconds = process.cpu_times(), time.perf_counter() - began
    used = after.user + after.system - before.user - before.system
    return used / seconds, process.memory_info().rss - held


if __name__ == "__main__":
    if len(sys.argv) > 1:
        from ddpdoctor.tui.app import DoctorApp

        DoctorApp(Turning(int(sys.argv[1]))).run()
    else:
        sys.exit(main())
