"""What collectives, meetings in the store and files that were waited for order."""

from __future__ import annotations

from typing import Any

import pytest

from ddpdoctor.diagnosis.files import Handover, Order
from ddpdoctor.record.streams.collectives import Wait
from tests.diagnosis.jobs import JobBuilder


def before_and_after(job: JobBuilder, *ranks: int, **call: Any) -> tuple[int, int]:
    """Two moments with a collective of some ranks between them."""
    first = job.tick()
    job.call(ranks, call.pop("kind", "barrier"), 50, **call)
    return first, job.tick()


@pytest.mark.parametrize("kind", ["barrier", "all_reduce", "all_gather"])
def test_a_collective_of_all_orders_all(kind: str) -> None:
    job = JobBuilder(2)
    first, second = before_and_after(job, 0, 1, kind=kind)
    order = Order(job.record())
    assert order.follows(0, first, 1, second) and order.follows(1, first, 0, second)
    assert not order.follows(1, second, 0, first)
    assert not order.unordered(0, first, 1, second)
    assert order.unordered(0, job.tick(), 1, job.tick()), "nothing comes after"


def test_a_broadcast_orders_what_its_root_did_and_a_reduce_what_its_root_does() -> None:
    job = JobBuilder(2)
    first, second = before_and_after(job, 0, 1, kind="broadcast", root=0)
    order = Order(job.record())
    assert order.follows(0, first, 1, second)
    assert order.unordered(1, first, 0, second)
    job = JobBuilder(2)
    first, second = before_and_after(job, 0, 1, kind="reduce", root=0)
    order = Order(job.record())
    assert order.unordered(0, first, 1, second)
    assert order.follows(1, first, 0, second)


def test_what_was_sent_may_have_been_received() -> None:
    job = JobBuilder(2)
    first = job.tick()
    job.call(0, "send", 50)
    job.call(1, "recv", 51)
    order = Order(job.record())
    assert order.follows(0, first, 1, job.tick())
    assert not order.follows(1, first, 0, job.tick())


def test_order_is_handed_on_by_a_third_rank() -> None:
    job = JobBuilder(3)
    left, right = job.group(0, 1), job.group(1, 2)
    first = job.tick()
    job.call((0, 1), "barrier", 50, group=left)
    job.call((1, 2), "barrier", 51, group=right)
    order = Order(job.record())
    assert order.follows(0, first, 2, job.tick())
    assert not order.follows(2, first, 0, job.tick())


def test_meetings_in_the_store_and_files_that_were_waited_for_order() -> None:
    job = JobBuilder(2)
    first = job.tick()
    job.waits = [
        Wait(rank=rank, kind="init_process_group", started_ns=job.tick(), ended_ns=job.tick(5)) for rank in job.ranks
    ]
    assert Order(job.record()).follows(0, first, 1, job.tick())
    assert Order(job.record()).unordered(0, job.tick(), 1, job.tick())
    job = JobBuilder(2)
    first, made, seen, second = (job.tick() for _ in range(4))
    order = Order(job.record(), (Handover(from_rank=0, from_ns=made, to_rank=1, to_ns=seen),))
    assert order.follows(0, first, 1, second)
    assert order.unordered(0, seen, 1, second)
