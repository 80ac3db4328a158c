"""A real job whose figures are fetched while it trains and when it hangs, and whose hang is passed on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.jobs_of_tests import kill_marked, marked

SCRIPT = """
import pathlib, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DDP(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while not pathlib.Path("hang").exists():
    optimizer.zero_grad()
    time.sleep(0.02 + 0.04 * (rank == 1))
    model(torch.randn(16, 64)).sum().backward()
    optimizer.step()
    goes_on = torch.tensor([0 if pathlib.Path("hang").exists() else 1])
    dist.all_reduce(goes_on, dist.ReduceOp.MIN)
    if not goes_on:
        break
if rank == 0:
    dist.barrier()
else:
    dist.broadcast(torch.zeros(3), 0)
"""


def _figures(url: str) -> dict[str, dict[str, float]]:
    """Of each name the figures by their rank, phase or state, or by nothing."""
    request = urllib.request.Request(url, headers={"Accept": "application/openmetrics-text"})
    with urllib.request.urlopen(request, timeout=60) as response:
        text = response.read().decode()
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = next((sample.labels[label] for label in ("rank", "phase", "state") if label in sample.labels), "")
            found.setdefault(sample.name, {})[key] = sample.value
    return found


def _until(url: str, holds: Callable[[dict[str, dict[str, float]]], bool]) -> dict[str, dict[str, float]]:
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline:
        if holds(figures := _figures(url)):
            return figures
        time.sleep(0.2)
    raise AssertionError(f"it did not come to that: {figures}")


def _has_the_straggler(found: dict[str, dict[str, float]]) -> bool:
    late, waiting = found.get("ddpdoctor_rank_late_seconds"), found.get("ddpdoctor_rank_waiting_seconds")
    return (
        late is not None and waiting is not None and late["1"] > 0.01 > late["0"] and waiting["0"] > 0.01 > waiting["1"]
    )


def test_a_straggler_and_then_a_hang_are_served_and_the_hang_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    watch = (sys.executable, "-m", "ddpdoctor", "profile", "--no-tui", "--nproc", "2", "--metrics", "0")
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(
            (*watch, "--on-hang", "sh -c 'cat > told.json'", "train.py"),
            cwd=tmp_path,
            env={**marked(os.environ, tmp_path), "XDG_STATE_HOME": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 60
        while not (found := re.findall(r"http://127\.0\.0\.1:\d+/metrics", (tmp_path / "said").read_text())):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (url,) = found
        figures = _until(url, _has_the_straggler)
        assert figures["ddpdoctor_hang"] == {"": 0} and figures["ddpdoctor_ranks_seen"] == {"": 2}
        assert figures["ddpdoctor_phase_seconds"].keys() >= {"forward", "backward_compute", "exposed_waiting"}
        (tmp_path / "hang").touch()
        figures = _until(url, lambda found: found.get("ddpdoctor_hang") == {"": 1})
        assert figures["ddpdoctor_run_state"]["stalled"] == 1
        assert figures["ddpdoctor_standstill_seconds"][""] > 0
        _until(url, lambda _: (tmp_path / "told.json").exists() and (tmp_path / "told.json").stat().st_size > 0)
        told = json.loads((tmp_path / "told.json").read_text())
        assert {rank for side in told["sides"] for rank in side["ranks"]} == {0, 1}
        assert told["finding"]["severity"] == "error" and "train.py" in told["text"]
        assert process.poll() is None  # The job is left alone.
    finally:
        kill_marked(tmp_path)
        process.wait(60)
