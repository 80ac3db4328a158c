"""What the kernel ended because the machine ran out of memory accuses nobody."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ddpdoctor.diagnosis.divergence.divergence import find_divergence
from ddpdoctor.diagnosis.divergence_kind import classify
from ddpdoctor.finding import Trouble
from ddpdoctor.monitor.rehearsal import kernel_kills
from ddpdoctor.record.model import StopReason
from tests.diagnosis.jobs import JobBuilder


@pytest.mark.parametrize(
    ("text", "kills"), [("oom_kill 3\nnr_free_pages 7\n", 3), ("nr_free_pages 7\n", 0), ("oom_kill x\n", 0)]
)
def test_the_kernel_counts_what_it_ended(text: str, kills: int, tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text(text)
    assert kernel_kills(tmp_path / "vmstat") == kills
    assert kernel_kills(tmp_path / "none") == 0


@pytest.mark.parametrize(("reason", "trouble"), [("memory", "lacking-machine"), ("proof", "early-exit")])
def test_a_rank_that_memory_ran_out_for_left_nobody(reason: StopReason, trouble: Trouble) -> None:
    job = JobBuilder(2)
    job.job |= {"kind": "rehearsal", "stop_reason": reason}
    job.call(0, "all_gather", 30, origin="ddp-construct")
    job.wait_in_last(0)
    job.leave(1, "signalled", signal=signal.SIGKILL)
    record = job.record()
    divergence = find_divergence(record)
    assert divergence is not None and classify(divergence, record) == trouble
