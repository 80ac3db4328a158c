"""A watched job that is sharded: phases from its forwards, and the late rank from its collectives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.check_command import with_our_tree
from tests.sharded.jobs import STEP, Job

SLOW = Job(
    name="rank 1 sleeps in each step",
    edits=((STEP, f"{STEP}            if dist.get_rank() == 1:\n                __import__('time').sleep(0.05)\n"),),
)


def test_the_forward_has_its_time_and_the_late_rank_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SLOW.text())
    command = [sys.executable, "-m", "ddpdoctor", "profile", "--no-tui", "--output-format", "json", "train.py"]
    environment = with_our_tree(XDG_STATE_HOME=str(tmp_path / "state"))
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    report = json.loads(done.stdout[done.stdout.index("{") :])
    late = [finding for finding in report["findings"] if finding["name"] == "straggler"]
    assert [finding["ranks"] for finding in late] == [[1]], done.stderr
    text = json.dumps(report)
    assert "all_gather_into_tensor" in text
    assert "reduce_scatter_tensor" in text
