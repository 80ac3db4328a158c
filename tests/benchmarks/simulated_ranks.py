"""Writes what a number of ranks of a live run would, through the writer that real ranks use, in real time.

``simulated_ranks.py RUN_DIRECTORY RANKS STEPS_PER_S`` fills the rings with the past, prints ``ready``, and goes on
until its stdin is closed. Each rank's process id is that of a process that sleeps.
"""

from __future__ import annotations

import json
import random
import select
import subprocess
import sys
import time
from pathlib import Path

from ddpdoctor.record import layout
from ddpdoctor.record.writer import Ring

BEATS_PER_S = 5
GRADIENT_BYTES = 100_000_000
_ALL_REDUCE = layout.CALL_KINDS.index("all_reduce")
_FORWARD = layout.PHASES.index("forward")


class SimulatedRank:
    """One rank whose steps all take the same time, but for a little noise in its phases."""

    def __init__(self, directory: Path, rank: int, ranks: int, pid: int, step_ns: int, started_ns: int) -> None:
        self._rank, self._step_ns, self._started_ns = rank, step_ns, started_ns
        self._noise = random.Random(rank)
        self.made = 0
        """Steps that were written."""
        self._steps = Ring(str(directory / layout.STEPS_FILE.format(pid)), layout.STEPS)
        self._calls = Ring(str(directory / layout.CALLS_FILE.format(pid)), layout.CALLS)
        frames = [["/home/user/train.py", 57, "train"], ["/home/user/train.py", 90, "main"]]
        events: list[dict[str, object]] = [
            {"event": "process", "pid": pid, "parent": 1, "rank": rank, "local_rank": rank % 8, "node": rank // 8},
            {"event": "torch", "version": "2.13.0"},
            {"event": "world", "rank": rank, "world_size": ranks, "backend": "nccl", "local_rank": rank % 8},
            {"event": "group", "number": 0, "ranks": list(range(ranks)), "backend": "nccl", "timeout_ns": 600 * 10**9},
            {"event": "site", "number": 0, "frames": frames},
        ]
        self._events = directory / layout.EVENTS_FILE.format(pid)
        with self._events.open("w") as file:
            file.writelines(json.dumps({"time_ns": started_ns, "kind": "start", **event}) + "\n" for event in events)

    def make_steps(self, until_ns: int) -> None:
        """Write the steps that are over by then."""
        while self._started_ns + (self.made + 1) * self._step_ns <= until_ns:
            self._make_step()

    def beat(self, now_ns: int) -> None:
        """Take the rows to their files, with a heartbeat."""
        self._calls.flush()
        self._steps.flush()
        values = dict.fromkeys(layout.HEARTBEAT_FIELDS, 0) | {
            "beat_at_ns": now_ns,
            "phase": _FORWARD,
            "phase_since_ns": now_ns - 10_000_000,
            "step": self.made + 1,
            "kind": -1,
            "sequence": -1,
            "enqueued": 3 * self.made,
            "completed": 3 * self.made,
            "site": -1,
            "main_cpu_ns": self.made * self._step_ns,
            "stack_hash": self.made,
        }
        self._steps.write_head(tuple(values[name] for name in layout.HEARTBEAT_FIELDS))
        self._calls.write_head()

    def _make_step(self) -> None:
        step_ns, started_ns = self._step_ns, self._started_ns + self.made * self._step_ns
        late_ns = self._noise.randrange(step_ns // 50)
        ready_ns = started_ns + step_ns * 7 // 10 + late_ns
        reduced_ns = started_ns + step_ns * 8 // 10
        self.made += 1
        values = dict.fromkeys(layout.STEP_FIELDS, -1) | {
            "step": self.made,
            "started_at_ns": started_ns,
            "ended_at_ns": started_ns + step_ns,
            "data_wait_ns": step_ns // 50,
            "forward_ns": step_ns // 4 + late_ns,
            "backward_ns": step_ns // 2 - late_ns,
            "explicit_ns": step_ns // 50,
            "optimizer_ns": step_ns // 20,
            "exposed_ns": reduced_ns - ready_ns,
            "window_ns": step_ns * 3 // 10,
            "ready_at_ns": ready_ns,
            "reduced_at_ns": reduced_ns,
            "reduced_bytes": GRADIENT_BYTES,
            "buckets": 5,
            "explicit_calls": 1,
            "explicit_bytes": 4,
            "samples": 32,
            "batches": 1,
            "micro_batches": 1,
            "synchronised": 1,
        }
        self._steps.put(tuple(values[name] for name in layout.STEP_FIELDS))
        entered_ns = started_ns + step_ns * 9 // 10 + late_ns
        left_ns = started_ns + step_ns * 92 // 100
        self._calls.put((_ALL_REDUCE, 0, self.made - 1, self.made, entered_ns, left_ns, 4, 0))


def main() -> None:
    directory, ranks, steps_per_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    sleepers = [subprocess.Popen(("sleep", "infinity")) for _ in range(ranks)]
    step_ns = int(1e9 / steps_per_s)
    started_ns = time.time_ns() - layout.LIVE_ROWS * step_ns
    try:
        simulated = [
            SimulatedRank(directory, rank, ranks, sleeper.pid, step_ns, started_ns)
            for rank, sleeper in enumerate(sleepers)
        ]
        ready = False
        while True:
            now_ns = time.time_ns()
            for rank in simulated:
                rank.make_steps(now_ns)
                rank.beat(now_ns)
            if not ready:
                ready = True
                print("ready", flush=True)
            spent_s = (time.time_ns() - now_ns) / 1e9
            if select.select([sys.stdin], [], [], max(0.0, 1 / BEATS_PER_S - spent_s))[0]:
                return
    finally:
        for sleeper in sleepers:
            sleeper.kill()


if __name__ == "__main__":
    main()
