"""One loop in different orders: what it takes to say that two things were mixed up."""

from __future__ import annotations

from ddpdoctor.diagnosis.divergence import describe
from ddpdoctor.diagnosis.divergence.divergence import find_divergence
from tests.diagnosis.jobs import JobBuilder, healthy_job


def looped(job: JobBuilder, *orders: tuple[str, ...], line: int = 70, between: bool = False) -> JobBuilder:
    """Let each rank go through a loop in an order of its own."""
    for rank, order in enumerate(orders):
        for subject in order:
            job.call(rank, "all_reduce", line, reduce_op="sum", subject=subject)
            if between:
                job.reduce_gradients(rank)
    return job


def test_the_same_things_in_another_order_are_mixed_up() -> None:
    divergence = find_divergence(looped(healthy_job(), ("'a'", "'b'", "'c'"), ("'a'", "'c'", "'b'")).record())
    assert divergence is not None
    assert (divergence.form, divergence.culprit) == ("swapped", None)
    assert describe.title(divergence) == (
        "the ranks run a loop in different orders: all_reduce at train.py:70 pairs 'b' of rank 0 with 'c' of rank 1"
    )
    texts = [fact.text for fact in describe.facts(divergence, "rehearsal")]
    assert "rank 1 calls all_reduce at train.py:70 on 'c' (1 element, float32, sum) in step 3" in texts


def test_ranks_that_agree_are_told_together() -> None:
    divergence = find_divergence(looped(healthy_job(3), ("a", "b"), ("b", "a"), ("a", "b")).record())
    assert divergence is not None
    assert describe.title(divergence).endswith("pairs a of ranks 0 and 2 with b of rank 1")


def test_parameters_without_a_name_are_told_apart_but_not_shown() -> None:
    divergence = find_divergence(looped(healthy_job(), ("#15f7", "#2b3c"), ("#2b3c", "#15f7")).record())
    assert divergence is not None
    assert describe.title(divergence).endswith("pairs a parameter of rank 0 with another of rank 1")
    assert not any("#" in fact.text for fact in describe.facts(divergence, "rehearsal"))


def test_one_order_other_things_and_turns_that_do_not_follow_each_other_prove_nothing() -> None:
    assert find_divergence(looped(healthy_job(), ("a", "b"), ("a", "b")).record()) is None
    assert find_divergence(looped(healthy_job(), ("own 0", "b"), ("own 1", "b")).record()) is None
    assert find_divergence(looped(healthy_job(), ("a", "b", ""), ("b", "", "a")).record()) is None
    assert find_divergence(looped(healthy_job(), ("a", "b"), ("b", "a"), between=True).record()) is None


def test_turns_of_different_steps_are_not_one_loop() -> None:
    job = healthy_job()
    for step, orders in enumerate([(("a",), ("b",)), (("b",), ("a",))], start=4):
        job.step(job.ranks, step)
        looped(job, *orders)
    assert find_divergence(job.record()) is None
