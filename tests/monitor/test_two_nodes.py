"""A job of two nodes, each with a monitor of its own that sees its own ranks only."""

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
import time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DDP(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(150):
    optimizer.zero_grad()
    time.sleep(0.03 + 0.06 * (rank == 3))
    model(torch.randn(16, 64)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def _reports(directory: Path) -> list[dict[str, Any]]:
    """What the monitor of each node reports at the end."""
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
            nodes.append(
                subprocess.Popen(
                    (*watch, "-o", f"node-{node}.json", "--", *torchrun, "train.py"),
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
        return [json.loads((directory / f"node-{number}.json").read_text()) for number in (0, 1)]
    finally:
        kill_marked(directory)


def test_a_straggler_is_named_on_its_own_node_and_nothing_is_laid_to_the_network_on_the_other(tmp_path: Path) -> None:
    elsewhere, here = _reports(tmp_path)
    assert (elsewhere["verdict"]["state"], elsewhere["verdict"]["code"]) == ("unknown", "")
    assert elsewhere["verdict"]["text"] == "2 of 4 ranks are seen here, and nothing slow was found of these"
    assert (here["verdict"]["state"], here["verdict"]["code"]) == ("slow", "DDP403")
    assert here["verdict"]["text"].startswith("rank 3 keeps rank 2 waiting for ")
    for report in (elsewhere, here):
        assert "DDP401" not in {finding["code"] for finding in report["findings"]}
        assert any("2 of 4 ranks reported" in note for note in report["notes"])
