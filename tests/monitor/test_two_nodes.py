"""A job of two launchers, with a monitor on each that sees its own ranks only, or on one of them alone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.jobs_of_tests import kill_marked, marked

SCRIPT = """
import os, signal, sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DDP(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(150):
    if rank == 3 and step == 60 and "killed" in sys.argv:
        time.sleep(3)
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    time.sleep(0.03 + 0.06 * (rank == 3))
    model(torch.randn(16, 64)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def _reports(directory: Path, watched: tuple[str, ...], *arguments: str) -> list[dict[str, Any]]:
    """What the monitor of each watched node reports at the end."""
    (directory / "train.py").write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    nodes = []
    try:
        for node in ("0", "1"):
            launch = ("--nnodes", "2", "--node-rank", node, "--nproc-per-node", "2", "--master-port", port)
            watch = (sys.executable, "-m", "ddpdoctor", "profile", "--no-tui", "--output-format", "json")
            torchrun = (sys.executable, "-m", "torch.distributed.run", "--master-addr", "127.0.0.1", *launch)
            observed = (*watch, "-o", f"node-{node}.json", "--") if node in watched else ()
            nodes.append(
                subprocess.Popen(
                    (*observed, *torchrun, "train.py", *arguments),
                    cwd=directory,
                    env={
                        **marked(os.environ, directory),
                        "XDG_STATE_HOME": str(directory / f"state-{node}"),
                        "OMP_NUM_THREADS": "1",
                    },
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            )
        for process in nodes:
            process.communicate(timeout=240)
        return [json.loads((directory / f"node-{number}.json").read_text()) for number in watched]
    finally:
        kill_marked(directory)


def test_the_monitor_of_rank_0_tells_of_all_ranks_and_the_other_one_says_where_that_is(tmp_path: Path) -> None:
    head, agent = _reports(tmp_path, ("0", "1"))
    assert (head["verdict"]["state"], head["verdict"]["code"]) == ("slow", "DDP403")
    assert head["verdict"]["text"].startswith("rank 3 keeps the others waiting for ")
    assert [rank["rank"] for rank in head["ranks"]] == [0, 1, 2, 3]
    assert not any("ranks reported" in note for note in head["notes"])
    assert agent["verdict"]["text"].startswith("rank 3 keeps rank 2 waiting for ")
    assert any("the verdict on all ranks is on" in note for note in agent["notes"])


def test_a_node_that_only_loses_its_peers_out_of_sight_says_that_the_cause_is_there(tmp_path: Path) -> None:
    (report,) = _reports(tmp_path, ("0",), "killed")
    assert report["verdict"]["state"] == "broken"
    assert "lost the connection to a rank on another node, where the cause is" in report["verdict"]["text"]
    assert "(2 of 4 ranks are visible here)" in report["verdict"]["text"]
    assert any("2 of 4 ranks reported" in note for note in report["notes"])
