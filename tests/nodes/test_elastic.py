"""An elastic job whose first machine is lost: it starts again on those that are left, with another head."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.nodes.jobs import SCRIPT, report, until
from tests.nodes.machines import Machine, machines, why_not

pytestmark = [pytest.mark.full, pytest.mark.skipif(bool(why_not()), reason=why_not() or "never")]


def elastic(machine: Machine, store: Machine, script: Path, least: int, most: int) -> list[str]:
    """The words that watch one node of a job of so many; its rendezvous is kept by another one than the first."""
    patience = "--rdzv-conf=last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"
    return [
        *(sys.executable, "-m", "ddpdoctor", "profile", "--no-tui", "--output-format", "json", "-o", "report.json"),
        *("--", sys.executable, "-m", "torch.distributed.run", "--nnodes", f"{least}:{most}", "--max-restarts", "3"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{store.name}:29577", "--rdzv-id", "elastic", patience),
        *("--nproc-per-node", "1", "--local-addr", machine.address, str(script), "straggler", "250"),
    ]


def test_a_job_that_loses_the_machine_of_its_head_gets_another_one(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with machines(tmp_path, 3) as (first, second, third):
        # A store that outlives a restart has one part for each attempt, which the nodes of torch 2.13 count apart: one
        # whose ranks failed is ahead of one whose ranks were only told to end, and they never meet.
        own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        started = [
            machine.start(elastic(machine, third, tmp_path / "train.py", 2, 3), own_store)
            for machine in (first, second, third)
        ]
        told = "the verdict on all ranks is on node0"
        until(lambda: told in second.text() and told in third.text())
        # Its network goes on: of a machine that is silent gloo notices nothing for half an hour.
        first.end(signal.SIGKILL)
        started[0].wait()
        for process in started[1:]:
            assert process.wait(timeout=300) == 0
        head, agent = report(second), report(third)
        assert {rank["rank"]: rank["host"] for rank in head["ranks"]} == {0: "node1", 1: "node2"}
        assert head["verdict"]["text"].startswith("rank 1 on node2 keeps rank 0 waiting")
        assert not any("node0" in note or "reported" in note for note in (*head["notes"], *agent["notes"]))
        assert any("the verdict on all ranks is on node1" in note for note in agent["notes"])
