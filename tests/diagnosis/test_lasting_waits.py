"""What is said of a rank for which others wait while it is at work."""

from __future__ import annotations

import msgspec
import pytest

from ddpdoctor.diagnosis.live_verdict import VerdictMemory, live_verdict, wait_text
from ddpdoctor.finding import Frame
from ddpdoctor.record.streams.measured import RankHeartbeat
from ddpdoctor.record.streams.setup import StackDump
from tests.diagnosis.jobs import SCRIPT, healthy_job

LOOP = Frame(SCRIPT, 60, "train")
LIBRARY = "/usr/lib/python3.11"
IN_LOADER = Frame("/site-packages/torch/utils/data/dataloader.py", 1291, "_MultiProcessingDataLoaderIter._try_get_data")


def said(*inside: Frame, restless: bool = False) -> str:
    """Said of a wait for rank 1, which is at line 60, with these frames inside of it."""
    memory, job = VerdictMemory(), healthy_job()
    job.call(0, "barrier", 70)
    job.wait_in_last(0)
    site = job.site(LOOP.line)
    job.tick(14_000)
    job.streams["stacks"] = (StackDump(rank=1, thread="main", main=True, frames=(*inside, LOOP), time_ns=job.now_ns),)
    job.streams["heartbeats"] = (RankHeartbeat(rank=1, beat_at_ns=job.now_ns, site=site),)
    record = job.record()
    ranks = tuple(msgspec.structs.replace(rank, restless=restless and rank.rank == 1) for rank in record.ranks)
    assert live_verdict(memory, msgspec.structs.replace(record, ranks=ranks), job.now_ns) is None
    assert memory.wait is not None
    return wait_text(memory.wait, job.now_ns)


def test_a_rank_whose_process_does_a_little_beside_it_is_not_called_busy() -> None:
    told = said(restless=True)
    assert told.endswith("which is stuck in `train` at train.py:60 (its process still has some activity)")
    in_queue = Frame(f"{LIBRARY}/queue.py", 171, "Queue.get")
    assert said(in_queue, restless=True).endswith("which waits in `train` at train.py:60 for a queue")


def test_a_rank_that_works_is_busy() -> None:
    assert said() == "rank 0 has waited 14 s for rank 1, busy in `train` at train.py:60"
    assert said(Frame("/site-packages/torch/nn/modules/linear.py", 125, "forward")).endswith(
        ", busy in `train` at train.py:60"
    )


@pytest.mark.parametrize(
    ("what", "inside"),
    [
        ("its loader's workers", (Frame(f"{LIBRARY}/multiprocessing/queues.py", 113, "Queue.get"), IN_LOADER)),
        ("a child process", (Frame(f"{LIBRARY}/subprocess.py", 1264, "wait"),)),
        ("a queue", (Frame("threading.py", 320, "Condition.wait"), Frame(f"{LIBRARY}/queue.py", 171, "Queue.get"))),
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


def told_from(*seen: int, store: bool = False) -> str:
    """Said by one that sees some ranks of four, of which ranks 0 and 2 wait."""
    memory, job = VerdictMemory(), healthy_job(4)
    if store:
        for rank in (0, 2):
            job.wait_in_store("init_process_group", 20, rank)
    else:
        job.call((0, 2), "barrier", 70)
        job.wait_in_last(0, 2)
    job.tick(14_000)
    record = job.record()
    record = msgspec.structs.replace(
        record,
        ranks=tuple(rank for rank in record.ranks if rank.rank in seen),
        collectives=tuple(track for track in record.collectives if track.rank in seen),
        waits=tuple(wait for wait in record.waits if wait.rank in seen),
    )
    live_verdict(memory, record, job.now_ns)
    assert memory.wait is not None
    return wait_text(memory.wait, job.now_ns)


def test_of_ranks_that_are_not_seen_nobody_is_accused() -> None:
    assert told_from(0, 2) == "ranks 0 and 2 have waited 14 s for some of ranks 1 and 3, which cannot be seen from here"


def test_a_rank_that_is_seen_not_to_have_come_goes_before_those_that_may_have() -> None:
    assert told_from(2, 3).startswith("rank 2 has waited 14 s for rank 3, ")


def test_a_rank_that_never_joined_is_missing() -> None:
    assert told_from(0, 2, store=True) == "ranks 0 and 2 have waited 14 s for rank 1, which has not reported"
