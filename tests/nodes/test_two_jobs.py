"""Two jobs at once on the same two machines: each monitor hears of its own job alone."""

from __future__ import annotations

import json
import subprocess
from functools import partial
from pathlib import Path

import msgspec
import pytest

from ddpdoctor.monitor.nodes.meeting import HeadKeys
from ddpdoctor.record import layout
from tests.nodes.jobs import SCRIPT, until
from tests.nodes.machines import Machine, machines, watched, why_not

pytestmark = [pytest.mark.full, pytest.mark.skipif(bool(why_not()), reason=why_not() or "never")]
PATIENCE_S = 600.0
FAULTS = {"one": "straggler", "other": "healthy"}


def started(both: list[Machine], name: str, script: Path, port: int) -> list[subprocess.Popen[bytes]]:
    """A job of one rank on each machine."""
    changed = {"29533": str(port), "report.json": f"{name}.json"}
    jobs = []
    for number, machine in enumerate(both):
        words = [changed.get(word, word) for word in watched(machine, both[0], number, script, ranks=1)]
        jobs.append(machine.start([*words, FAULTS[name], "120"], output=f"{name}.txt"))
    return jobs


def is_told(machine: Machine, name: str) -> bool:
    return "the verdict on all ranks is on node0" in machine.text(f"{name}.txt")


def test_two_jobs_on_the_same_machines_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with machines(tmp_path) as both:
        jobs = [
            job for port, name in enumerate(FAULTS, 29533) for job in started(both, name, tmp_path / "train.py", port)
        ]
        for name in FAULTS:
            until(partial(is_told, both[1], name), PATIENCE_S)
        kept = [path.read_bytes() for path in both[0].home.glob(f"state/ddpdoctor/runs/*/{layout.HEAD_KEY_FILE}")]
        one, other = (msgspec.json.decode(content, type=HeadKeys) for content in kept)
        assert one.meeting.port != other.meeting.port
        assert one.meeting.server_key != other.meeting.server_key
        for job in jobs:
            assert job.wait(timeout=PATIENCE_S) == 0
        for name in FAULTS:
            head, agent = (json.loads((machine.home / f"{name}.json").read_text()) for machine in both)
            assert {rank["rank"]: rank["host"] for rank in head["ranks"]} == {0: "node0", 1: "node1"}
            assert [rank["rank"] for rank in agent["ranks"]] == [1]
            assert any("the verdict on all ranks is on node0" in note for note in agent["notes"])
            is_slow = head["verdict"]["text"].startswith("rank 1 on node1 keeps rank 0 waiting")
            assert is_slow == (FAULTS[name] == "straggler"), head["verdict"]
