from __future__ import annotations

from pathlib import Path

from ddpdoctor.probe.journal import Journal
from ddpdoctor.probe.live.heartbeat import EVERY_STEPS, Gauges
from ddpdoctor.record.assembly.assemble import Assembly
from ddpdoctor.record.model import Job
from ddpdoctor.record.streams.measured import Gauge


def test_the_newest_total_of_each_name_is_in_the_record(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path), {"kind": "rehearsal"})
    journal.event("process", pid=journal.pid, parent=1, kind="start", rank=3)
    gauges, spent = Gauges(journal), [500]
    gauges.add("garbage collection", "ns", lambda: spent[0])
    gauges.look(0)
    for step in range(1, 2 * EVERY_STEPS + 2):
        spent[0] += 100
        gauges.look(step)
    gauges.look(2 * EVERY_STEPS + 2, last=True)
    assembly = Assembly(tmp_path)
    assembly.poll()
    steps = 2 * EVERY_STEPS + 1
    (gauge,) = assembly.record(Job(kind="run")).gauges
    assert gauge == Gauge(
        rank=gauge.rank, name="garbage collection", unit="ns", total=2 * EVERY_STEPS * 100, steps=steps
    )
    assert gauge.per_step == 2 * EVERY_STEPS * 100 / steps


def test_nothing_is_written_of_a_rank_that_makes_no_step(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path), {"kind": "rehearsal"})
    gauges = Gauges(journal)
    gauges.add("anything", "count", lambda: 1)
    gauges.look(1, last=True)
    assert "gauge" not in "".join(path.read_text(errors="replace") for path in tmp_path.iterdir())
