"""What a rank loses to the machine, and not to its own work, is named as what makes it late."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from ddpdoctor.checks.speed import exposed_communication, straggler
from ddpdoctor.record.layout import CORE_WAIT, KERNEL_TIME, PAGE_FAULTS
from ddpdoctor.record.streams.measured import Gauge
from tests.checks.test_speed import COMPUTE, said
from tests.diagnosis.measured_job import MeasuredJob


def lost(name: str, *totals: int, unit: Literal["ns", "count"] = "ns") -> list[Gauge]:
    return [Gauge(rank=rank, name=name, unit=unit, total=50 * total, steps=50) for rank, total in enumerate(totals)]


SLOWER = {1: {"forward": 12.0, "backward": 6.0}}
KERNEL, FAULTS = lost(KERNEL_TIME, 2_500_000, 17_000_000), lost(PAGE_FAULTS, 900, 8_400, unit="count")


def test_page_faults_are_the_cause_where_the_kernel_takes_most_of_what_the_others_wait() -> None:
    (finding,) = said(straggler, MeasuredJob(2).run(60, COMPUTE, SLOWER), gauges=(*KERNEL, *FAULTS))
    assert finding.title.endswith(" because of its page faults")
    assert "MALLOC_TRIM_THRESHOLD_" in finding.remedy
    assert finding.evidence[-1].text == (
        "the kernel takes 17.0 ms of a step on rank 1 over 8,400 page faults, and 2.5 ms over 900 on the others"
    )


@pytest.mark.parametrize(
    "gauges",
    [
        (),
        KERNEL,
        FAULTS,
        (*KERNEL, *lost(PAGE_FAULTS, 8_000, 8_400, unit="count")),
        (*lost(KERNEL_TIME, 4_000_000, 6_000_000), *FAULTS),
        (*KERNEL[1:], *FAULTS),
        lost(CORE_WAIT, 3_000_000, 4_000_000),
    ],
)
def test_what_explains_less_than_half_of_the_wait_is_no_cause(gauges: tuple[Gauge, ...]) -> None:
    (finding,) = said(straggler, MeasuredJob(2).run(60, COMPUTE, SLOWER), gauges=tuple(gauges))
    assert finding.title.endswith(" because of its forward and backward")


def test_other_programs_on_the_cores_are_the_cause_only_where_they_last() -> None:
    waits = tuple(lost(CORE_WAIT, 200_000, 16_000_000))
    assert said(straggler, MeasuredJob(2).run(60, COMPUTE, SLOWER), gauges=waits) == []
    much, most = {1: {"forward": 60.0}}, tuple(lost(CORE_WAIT, 200_000, 55_000_000))
    # Nor do the ranks take turns then.
    assert said(exposed_communication, MeasuredJob(2).run(60, COMPUTE, much), gauges=most) == []
    (finding,) = said(straggler, MeasuredJob(2).run(150, COMPUTE, SLOWER), gauges=waits)
    assert finding.title.endswith(" because of what else runs on its cores")
    assert finding.evidence[-1].text == "rank 1 waits 16.0 ms of a step for a free core, and the others 0.20 ms"


ON_TWO_CORES = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or (os.cpu_count() or 1) < 2, reason="each rank is bound to a core of its own"
)
PAGES = "torch.empty(1 << 24)[::1024].fill_(0)"
"""64 MiB are taken, one number of each page is written, and they are given back."""
HOG = "subprocess.Popen([sys.executable, '-c', 'while True: pass'])"
SCRIPT = """
import os, subprocess, sys, time
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.set_num_threads(1)
os.sched_setaffinity(0, {rank})
hog = None
if rank == 1:
    START
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
until_s = time.monotonic() + SECONDS
more = torch.ones(1)
while more:
    optimizer.zero_grad()
    loss = model(torch.ones(4, 8)).sum()
    began_s = time.thread_time()
    while time.thread_time() < began_s + 0.02:
        pass
    if rank == 1:
        STEP
    loss.backward()
    optimizer.step()
    more = torch.tensor(float(time.monotonic() < until_s))
    dist.broadcast(more, 0)
if hog is not None:
    hog.kill()
dist.destroy_process_group()
"""


def _verdict(tmp_path: Path, seconds: int, *, start: str = "pass", step: str = "pass", **variables: str) -> Any:
    script = SCRIPT.replace("SECONDS", str(seconds)).replace("START", start).replace("STEP", step)
    (tmp_path / "train.py").write_text(script)
    done = subprocess.run(
        (sys.executable, "-m", "ddpdoctor", "profile", "--no-tui", "--output-format", "json", "-o", "report.json")
        + ("--nproc", "2", "train.py"),
        cwd=tmp_path,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), **variables},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (tmp_path / "report.json").exists(), done.stderr
    return json.loads((tmp_path / "report.json").read_text())["verdict"]


@ON_TWO_CORES
@pytest.mark.alone
@pytest.mark.timeout(400)
def test_page_faults_are_named_and_the_remedy_takes_them_away(tmp_path: Path) -> None:
    verdict = _verdict(tmp_path, 6, step=PAGES)
    assert verdict["code"] == "DDP403"
    assert verdict["text"].startswith("rank 1 keeps rank 0 waiting for ")
    assert "because of its page faults" in verdict["text"]
    names = [word for word in verdict["next"].split() if word.startswith("MALLOC_")]
    assert len(names) == 2, verdict["next"]
    (tmp_path / "report.json").unlink()
    after = _verdict(tmp_path, 6, step=PAGES, **dict.fromkeys(names, "1073741824"))
    assert after["code"] != "DDP403", after["text"]


@ON_TWO_CORES
@pytest.mark.alone
@pytest.mark.timeout(400)
def test_what_else_runs_on_the_cores_of_a_rank_is_named(tmp_path: Path) -> None:
    verdict = _verdict(tmp_path, 16, start=f"hog = {HOG}")
    assert verdict["code"] == "DDP403"
    assert "because of what else runs on its cores" in verdict["text"]
