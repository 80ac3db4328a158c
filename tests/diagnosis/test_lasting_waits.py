"""What is said of a rank for which others wait while it is at work."""

from __future__ import annotations

import pytest

from ddpdoctor.diagnosis.live.lasting_waits import told_wait
from ddpdoctor.diagnosis.live.verdict import Watch, live_verdict
from ddpdoctor.finding import Frame
from ddpdoctor.record.streams.measured import Pulse
from ddpdoctor.record.streams.stacks import StackDump
from tests.diagnosis.jobs import SCRIPT, healthy_job

LOOP = Frame(SCRIPT, 60, "train")
LIBRARY = "/usr/lib/python3.11"
LOADER = "/site-packages/torch/utils/data/dataloader.py"


def said(*inside: Frame) -> str:
    """Said of a wait for rank 1, which is at line 60, with these frames inside of it."""
    watch, job = Watch(), healthy_job()
    job.call(0, "barrier", 70)
    job.wait_in_last(0)
    site = job.site(LOOP.line)
    job.tick(14_000)
    job.streams["stacks"] = (StackDump(rank=1, thread="main", main=True, frames=(*inside, LOOP), time_ns=job.now_ns),)
    job.streams["pulses"] = (Pulse(rank=1, beat_at_ns=job.now_ns, site=site),)
    assert live_verdict(watch, job.record(), job.now_ns) is None
    assert watch.wait is not None
    return told_wait(watch.wait, job.now_ns)


def test_a_rank_that_works_is_busy() -> None:
    assert said() == "rank 0 has waited 14 s for rank 1, busy in `train` at train.py:60"
    assert said(Frame("/site-packages/torch/nn/modules/linear.py", 125, "forward")).endswith(
        ", busy in `train` at train.py:60"
    )


@pytest.mark.parametrize(
    ("what", "inside"),
    [
        ("its loader's workers", (Frame(f"{LIBRARY}/queue.py", 171, "get"), Frame(LOADER, 1275, "_try_get_data"))),
        ("a child process", (Frame(f"{LIBRARY}/subprocess.py", 1264, "wait"),)),
        ("a queue", (Frame(f"{LIBRARY}/threading.py", 320, "wait"), Frame(f"{LIBRARY}/queue.py", 171, "get"))),
        ("another thread", (Frame(f"{LIBRARY}/threading.py", 1112, "join"),)),
        ("a connection", (Frame(f"{LIBRARY}/socket.py", 706, "readinto"),)),
    ],
)  # fmt: skip
def test_a_rank_that_waits_for_somebody_else_is_said_to(what: str, inside: tuple[Frame, ...]) -> None:
    assert said(*inside) == f"rank 0 has waited 14 s for rank 1, which waits in `train` at train.py:60 for {what}"


def test_what_a_function_of_the_users_waits_for_is_told_of_its_own_line() -> None:
    fetch = Frame(SCRIPT, 12, "fetch")
    told = said(Frame(f"{LIBRARY}/socket.py", 706, "readinto"), fetch)
    assert told.endswith(", which waits in `fetch` at train.py:12 for a connection")
