"""A firewall between two machines that drops what the monitors say, and lets the job through."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.nodes.jobs import SCRIPT, report, until
from tests.nodes.machines import Machine, machines, watched, why_not

pytestmark = [pytest.mark.full, pytest.mark.skipif(bool(why_not()), reason=why_not() or "never")]
PORT = 29600
PATIENCE_S = 600.0


def started(both: list[Machine], script: Path, steps: int) -> list[subprocess.Popen[bytes]]:
    """The job of a straggler on both machines, whose monitors talk by one port."""
    script.write_text(SCRIPT)
    jobs = []
    for number, machine in enumerate(both):
        words = watched(machine, both[0], number, script)
        at = words.index("profile") + 1
        jobs.append(machine.start([*words[:at], "--head", f"node0:{PORT}", *words[at:], "straggler", str(steps)]))
    return jobs


def seen_apart(both: list[Machine]) -> None:
    """Each machine has its own ranks, and nothing is concluded of the others."""
    first, second = map(report, both)
    assert [rank["rank"] for rank in first["ranks"]] == [0, 1]
    assert [rank["rank"] for rank in second["ranks"]] == [2, 3]
    assert first["verdict"]["state"] == "unknown"
    assert second["verdict"]["code"] in ("", "DDP403")  # Where it is told late, on a busy machine, or not at all.


def test_monitors_that_never_hear_of_each_other_say_so_once(tmp_path: Path) -> None:
    with machines(tmp_path) as both:
        both[0].silence(PORT)
        for process in started(both, tmp_path / "train.py", 200):
            assert process.wait(timeout=PATIENCE_S) == 0
        seen_apart(both)
        (told,) = (note for note in report(both[0])["notes"] if f"has connected to port {PORT} of this machine" in note)
        assert "a firewall or a wrong host name blocks them" in told
        (told,) = (note for note in report(both[1])["notes"] if "cannot receive" in note)
        assert f"this node's ranks (node0: no answer, at port {PORT}); this node's record is complete" in told


def test_monitors_that_hear_nothing_of_each_other_any_more_judge_what_they_see(tmp_path: Path) -> None:
    with machines(tmp_path) as both:
        first, second = both
        jobs = started(both, tmp_path / "train.py", 300)
        until(lambda: "the verdict on all ranks is on node0" in second.text(), PATIENCE_S)
        until(lambda: "steps/s" in first.text(), PATIENCE_S)
        first.silence(PORT)
        until(lambda: "no message from node1 (ranks 2 and 3) for " in first.text(), PATIENCE_S)
        unheard = f"node0 cannot receive this node's ranks (node0:{PORT}: it has not answered"
        until(lambda: unheard in second.text(), PATIENCE_S)
        for process in jobs:
            assert process.wait(timeout=PATIENCE_S) == 0
        assert "STALLED" not in first.text() + second.text()
        seen_apart(both)
