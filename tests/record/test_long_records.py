"""A million steps of a rank, and what comes with them: what is kept of them grows no further, nor do its files."""

from __future__ import annotations

import gc
import json
import tracemalloc
from pathlib import Path

from ddpdoctor.probe.journal import Journal
from ddpdoctor.probe.live.heartbeat import Gauges
from ddpdoctor.record import layout
from ddpdoctor.record.assembly.assemble import MOST_FAULTS, MOST_WAITS, Assembly
from ddpdoctor.record.model import Job
from ddpdoctor.record.writer import Ring

STEPS = 1_000_000
A_LOOK = 4_000
LOOKS = STEPS // A_LOOK
TRACED_FROM = 2 * LOOKS // 3
STEP_NS = 5_000_000
FLAT_BYTES = 300_000


def test_a_million_steps_need_no_more_memory_than_two_thirds_of_them(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path), {"kind": "run"})
    journal.event("process", pid=journal.pid, parent=1, kind="start", rank=0)
    journal.event("world", rank=0, world_size=1, backend="gloo", local_rank=0)
    journal.event("site", number=0, frames=[["/job/train.py", 7, "main"]])
    events = tmp_path / layout.EVENTS_FILE.format(journal.pid)
    steps = Ring(str(tmp_path / layout.STEPS_FILE.format(journal.pid)), layout.STEPS)
    calls = Ring(str(tmp_path / layout.CALLS_FILE.format(journal.pid)), layout.CALLS)
    gauges, made = Gauges(journal), 0
    gauges.add("garbage collection", "ns", lambda: 100 * made)
    assembly = Assembly(tmp_path)
    held: list[int] = []
    try:
        for look in range(LOOKS):
            for step in range(look * A_LOOK + 1, (look + 1) * A_LOOK + 1):
                at_ns = step * STEP_NS
                steps.put((step, at_ns, at_ns + STEP_NS, *(0,) * (len(layout.STEP_FIELDS) - 3)))
                if step % 10 == 0:
                    calls.put((1, 0, step, step, at_ns, at_ns + 1, 4, 0))
                    gauges.look(step)
            made = (look + 1) * A_LOOK
            for number in range(100 * look, 100 * look + 100):
                journal.event("wait_begun", number=number, kind="new_group", ranks=None, site=0, direct=True)
                journal.event("wait_ended", number=number)
            with events.open("a") as file:
                file.writelines(
                    json.dumps({"event": "wait_ended", "time_ns": 1, "number": -1}) + "\n" for _ in range(9)
                )
            steps.flush()
            calls.flush()
            steps.write_head((0,) * len(layout.HEARTBEAT_FIELDS))
            calls.write_head()
            assembly.poll()
            record = assembly.record(Job(kind="run"))
            if look == TRACED_FROM:
                tracemalloc.start()
            if look in (TRACED_FROM + 5, LOOKS - 1):
                gc.collect()
                held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    (track,), (gauge,) = record.step_tracks, record.gauges
    assert (len(track), track.step[-1]) == (layout.LIVE_ROWS, STEPS)
    assert gauge.steps > 0.98 * STEPS
    assert held[1] - held[0] < FLAT_BYTES
    assert len(record.waits) <= MOST_WAITS
    assert len(assembly.faults) == MOST_FAULTS
    written = sum(line.count('"gauge"') for line in events.read_text().splitlines())
    assert written < 1_500
