from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from ddpdoctor.check import BoundHit
from ddpdoctor.checks.data import missing_distributed_sampler, missing_set_epoch, uneven_inputs
from ddpdoctor.finding import Finding, Location, Refuted, Severity
from tests.checks.training import LOADER_LINE, forward, probes, training, training_pass
from tests.diagnosis.jobs import SCRIPT, JobBuilder

PLACE = Location(file=SCRIPT, line=LOADER_LINE, function="train")


def sampler_results(streams: dict[str, Any], job: JobBuilder) -> list[Finding | Refuted]:
    return list(missing_distributed_sampler.in_run(job.record(**streams)))


def test_ranks_that_draw_the_same_samples_are_an_error() -> None:
    job = JobBuilder(2)
    (finding,) = sampler_results(training(job, sampler_type="RandomSampler", sampler_shuffles=True), job)
    assert isinstance(finding, Finding)
    assert (finding.code, finding.severity, finding.locations) == ("DDP101", Severity.ERROR, (PLACE,))
    assert finding.title == (
        "ranks 0 and 1 train on the same samples: they each draw 100 of 100 samples, 100 of them the same"
    )
    assert finding.evidence[0].numbers["samples_shared"] == 100


def test_a_sampler_that_derives_from_torchs_and_goes_through_all_of_the_data_divides_nothing() -> None:
    job = JobBuilder(2)
    (finding,) = sampler_results(training(job, sampler_type="Binned", sampler_shards=True), job)
    assert isinstance(finding, Finding)
    assert finding.evidence[0].text.endswith("the sampler is Binned, which does not divide by rank")


def test_large_data_sets_without_kept_indices_are_judged_by_their_samplers() -> None:
    job = JobBuilder(2)
    streams = training(job, sampler_type="RandomSampler")
    streams["passes"] = tuple(training_pass(rank, index_count=100, index_digest=f"order {rank}") for rank in (0, 1))
    assert len(sampler_results(streams, job)) == 1
    streams = training(job, sampler_type="WeightedRandomSampler") | {"passes": streams["passes"]}
    assert sampler_results(streams, job) == []


def test_sharded_indices_refute_the_suspicion() -> None:
    job = JobBuilder(2)
    streams = training(job, sampler_type="DistributedSampler", sampler_shards=True)
    streams["passes"] = tuple(
        training_pass(rank, indices=[*range(rank, 99, 2), 0], index_count=51, index_digest=f"order {rank}")
        for rank in (0, 1)
    )
    (refuted,) = sampler_results(streams, job)
    assert isinstance(refuted, Refuted)
    assert refuted.location == PLACE


def test_a_data_set_that_was_split_by_rank_refutes_the_suspicion() -> None:
    job = JobBuilder(2)
    streams = training(job)
    streams["loaders"] = tuple(
        type(loader)(
            rank=loader.rank, loader=0, site=loader.site, samples=probes(f"shard {loader.rank} sample {{}}".format)
        )
        for loader in streams["loaders"]
    )
    (refuted,) = sampler_results(streams, job)
    assert isinstance(refuted, Refuted)


def evaluation_only(streams: dict[str, Any]) -> None:
    streams["passes"] = tuple(training_pass(rank, indices=range(100), index_count=100, backwards=0) for rank in (0, 1))


def random_with_replacement(streams: dict[str, Any]) -> None:
    streams["passes"] = tuple(
        training_pass(rank, indices=[1, 1, *range(98)], index_count=100, index_digest=str(rank)) for rank in (0, 1)
    )


def loader_on_one_rank(streams: dict[str, Any]) -> None:
    streams["loaders"] = streams["loaders"][:1]


def no_wrap(streams: dict[str, Any]) -> None:
    streams["wraps"] = ()


def one_sample_that_was_padded(streams: dict[str, Any]) -> None:
    streams["loaders"] = tuple(
        msgspec.structs.replace(loader, sampler_shards=True, dataset_length=1) for loader in streams["loaders"]
    )
    streams["passes"] = tuple(
        training_pass(rank, indices=[0], index_count=1, index_digest="the only one") for rank in (0, 1)
    )


def bypassed_forwards(streams: dict[str, Any]) -> None:
    streams["forwards"] = ()


@pytest.mark.parametrize(
    "change",
    [
        evaluation_only,
        random_with_replacement,
        loader_on_one_rank,
        no_wrap,
        bypassed_forwards,
        one_sample_that_was_padded,
    ],
)
def test_without_proof_of_shared_samples_nothing_is_said(change: Any) -> None:
    job = JobBuilder(2)
    streams = training(job)
    change(streams)
    assert sampler_results(streams, job) == []


@pytest.mark.parametrize(
    "loader",
    [
        {"samples": probes(lambda index: "noise")},
        {"samples": probes(lambda index: "the same")},
    ],
    ids=["random batches", "constant samples"],
)
def test_samples_that_tell_nothing_are_no_proof(loader: dict[str, Any]) -> None:
    job = JobBuilder(2)
    assert sampler_results(training(job, **loader), job) == []


def test_samples_that_could_not_be_compared_are_said_to_be_unknown() -> None:
    job = JobBuilder(2)
    with pytest.raises(BoundHit, match="could not be compared"):
        sampler_results(training(job, samples=()), job)


def test_an_iterable_data_set_that_gives_all_ranks_the_same_is_an_error() -> None:
    job = JobBuilder(2)
    streams = training(job, iterable=True, dataset_type="Stream", samples=())
    streams["forwards"] = tuple(forward(rank, step, f"step {step}") for step in range(4) for rank in job.ranks)
    (finding,) = sampler_results(streams, job)
    assert isinstance(finding, Finding)
    assert finding.title.endswith("Stream gave all of them equal inputs in each of 4 steps")


@pytest.mark.parametrize(
    ("inputs", "errors"),
    [(lambda rank, step: f"step {step}", 1), (lambda rank, step: f"{rank} {step}", 0), (lambda rank, step: "zeros", 0)],
)
def test_a_pass_that_gave_no_index_list_is_judged_by_equal_inputs(
    inputs: Callable[[int, int], str], errors: int
) -> None:
    job = JobBuilder(2)
    streams = training(job, sampler_type="RandomSampler")
    streams["passes"] = tuple(training_pass(rank, index_count=None, index_digest="") for rank in job.ranks)
    streams["forwards"] = tuple(forward(rank, step, inputs(rank, step)) for step in range(4) for rank in job.ranks)
    found = sampler_results(streams, job)
    assert len([one for one in found if isinstance(one, Finding)]) == errors
    assert not any(isinstance(one, Refuted) for one in found)


def test_an_iterable_data_set_that_shards_itself_is_refuted_and_constant_inputs_say_nothing() -> None:
    job = JobBuilder(2)
    streams = training(job, iterable=True)
    (refuted,) = sampler_results(streams, job)
    assert isinstance(refuted, Refuted)
    streams["forwards"] = tuple(forward(rank, step, "zeros") for step in range(4) for rank in job.ranks)
    assert sampler_results(streams, job) == []


def of_workers(inputs: Callable[[int, int], str], workers: int = 2) -> list[Finding | Refuted]:
    job = JobBuilder(2)
    streams = training(job, iterable=True, dataset_type="Stream", samples=(), workers=workers)
    streams["forwards"] = tuple(
        msgspec.structs.replace(forward(rank, step, inputs(rank, step)), pass_ordinal=0, batch=step)
        for step in range(4)
        for rank in job.ranks
    )
    return sampler_results(streams, job)


def test_workers_that_give_equal_batches_in_turn_are_an_error() -> None:
    (finding,) = of_workers(lambda rank, step: f"rank {rank} round {step // 2}")
    assert isinstance(finding, Finding)
    assert finding.title == (
        "ranks 0 and 1 train on every batch 2 times: the 2 workers of this DataLoader gave equal batches in each of 2 "
        "rounds"
    )


def test_workers_are_no_cause_of_inputs_that_never_change_and_of_one_round() -> None:
    assert of_workers(lambda rank, step: f"rank {rank}") == []
    assert of_workers(lambda rank, step: f"rank {rank}", workers=4) == []
    assert of_workers(lambda rank, step: f"rank {rank} round {(step + 1) // 2}") == []
    (refuted,) = of_workers(lambda rank, step: f"rank {rank} round {step // 2}", workers=1)
    assert isinstance(refuted, Refuted)


def epochs(job: JobBuilder, orders: list[str], set_epochs: list[int | None], **loader: Any) -> list[Finding | Refuted]:
    streams = training(job, **{"sampler_shards": True, "sampler_shuffles": True, **loader})
    streams["passes"] = tuple(
        training_pass(rank, ordinal, index_count=50, index_digest=f"{rank} {order}", set_epoch=epoch)
        for rank in job.ranks
        for ordinal, (order, epoch) in enumerate(zip(orders, set_epochs, strict=True))
    )
    return list(missing_set_epoch.in_run(job.record(**streams)))


def test_the_same_order_in_two_epochs_is_a_warning() -> None:
    (finding,) = epochs(JobBuilder(2), ["a", "a"], [None, None], sampler_type="DistributedSampler")
    assert isinstance(finding, Finding)
    assert (finding.severity, finding.locations) == (Severity.WARNING, (PLACE,))
    assert finding.title == (
        "rank 0 drew its 50 samples in the same order in 2 training passes: "
        "set_epoch was never called on the DistributedSampler"
    )


def test_set_epoch_refutes_the_suspicion() -> None:
    (refuted,) = epochs(JobBuilder(2), ["a", "b"], [0, 1])
    assert isinstance(refuted, Refuted)


def test_an_order_that_may_repeat_is_not_reported() -> None:
    assert epochs(JobBuilder(2), ["a"], [None]) == []
    assert epochs(JobBuilder(2), ["a", "a"], [None, None], sampler_shuffles=False) == []
    assert epochs(JobBuilder(2), ["a", "a"], [5, 5]) == []
    assert epochs(JobBuilder(2), ["a", "b"], [None, None]) == []


def lengths(job: JobBuilder, *fields: dict[str, Any]) -> list[Finding | Refuted]:
    streams = training(job)
    streams["passes"] = tuple(training_pass(rank, **values) for rank, values in enumerate(fields))
    return list(uneven_inputs.in_run(job.record(**streams)))


def test_passes_of_different_length_are_an_error() -> None:
    (finding,) = lengths(JobBuilder(3), {"true_length": 63}, {"true_length": 62}, {"true_length": 63})
    assert isinstance(finding, Finding)
    assert (finding.severity, finding.locations, finding.ranks) == (Severity.ERROR, (PLACE,), (0, 1, 2))
    assert finding.title == (
        "the ranks' training passes differ in length: rank 1 gets 62 batches, ranks 0 and 2 get 63 batches"
    )


def test_the_hang_that_uneven_passes_caused_is_part_of_their_finding() -> None:
    job = JobBuilder(2)
    job.reduce_gradients(job.ranks)
    job.leave(1, "finished")
    job.reduce_gradients(0)
    job.wait_in_last(0)
    (finding,) = lengths(
        job,
        {"true_length": 4, "yielded": 4, "end": "open"},
        {"true_length": 3, "yielded": 3, "end": "exhausted"},
    )
    assert isinstance(finding, Finding)
    assert finding.title.endswith(
        "; then rank 1 ran to its end and left while rank 0 waits in all_reduce (DDP backward) at train.py:50"
    )
    assert any(fact.stack for fact in finding.evidence)


@pytest.mark.parametrize(
    "fields",
    [
        ({"true_length": 62}, {"true_length": 62}),
        ({"true_length": 63, "joined": True}, {"true_length": 62, "joined": True}),
        ({"true_length": 63, "backwards": 0}, {"true_length": 62, "backwards": 0}),
        ({"true_length": None, "end": "cut"}, {"true_length": 62}),
        ({"true_length": 63, "end": "abandoned"}, {"true_length": 62, "end": "abandoned"}),
        ({"true_length": 63, "end": "counted"}, {"true_length": 62, "end": "counted"}),
    ],
    ids=["equal", "join", "evaluation", "unknown", "bounded by steps", "counted"],
)
def test_lengths_that_do_no_harm_are_not_reported(fields: tuple[dict[str, Any], ...]) -> None:
    assert lengths(JobBuilder(2), *fields) == []


def test_passes_left_at_the_ranks_own_lengths_are_uneven() -> None:
    left = {"end": "abandoned", "by_length": True}
    (finding,) = lengths(JobBuilder(2), {"true_length": 63, **left}, {"true_length": 62, **left})
    assert isinstance(finding, Finding)
    assert finding.title.endswith("differ in length: rank 1 gets 62 batches, rank 0 gets 63 batches")


def test_samples_that_divide_evenly_whatever_the_number_of_ranks_refute_the_suspicion() -> None:
    (refuted,) = lengths(JobBuilder(2), {"index_count": 48}, {"index_count": 48})
    assert isinstance(refuted, Refuted)
    assert refuted.location == PLACE
    assert refuted.reason.startswith("the ranks' 96 samples divide evenly by 2, 4 and 8 ranks")


@pytest.mark.parametrize("counts", [(50, 50), (48, 56), (None, None)], ids=["not by 8", "unequal", "unknown"])
def test_equal_passes_of_this_run_alone_refute_nothing(counts: tuple[int | None, int | None]) -> None:
    assert lengths(JobBuilder(2), *({"index_count": count} for count in counts)) == []


def test_a_loader_that_is_started_anew_in_a_loop_over_steps_does_no_harm() -> None:
    job = JobBuilder(2)
    streams = training(job)
    streams["passes"] = tuple(
        training_pass(
            rank, ordinal, true_length=3 - rank, yielded=3 - rank, end="exhausted" if ordinal == 0 else "open"
        )
        for rank in job.ranks
        for ordinal in (0, 1)
    )
    assert list(uneven_inputs.in_run(job.record(**streams))) == []


def kept_copies(inputs: Callable[[int, int], str], stale: tuple[str, ...] = ("epoch",)) -> list[Finding | Refuted]:
    job = JobBuilder(2)
    streams = training(job, workers=2, persistent=True)
    streams["passes"] = tuple(
        training_pass(rank, ordinal, stale=stale if ordinal else ()) for rank in job.ranks for ordinal in range(2)
    )
    streams["forwards"] = tuple(
        msgspec.structs.replace(
            forward(rank, step, f"rank {rank} {inputs(ordinal, step)}"), pass_ordinal=ordinal, batch=step
        )
        for rank in job.ranks
        for ordinal in range(2)
        for step in range(4)
    )
    return list(missing_set_epoch.in_run(job.record(**streams)))


def test_kept_workers_that_give_the_first_pass_again_never_see_what_is_set() -> None:
    (finding,) = kept_copies(lambda ordinal, step: f"batch {step}")
    assert isinstance(finding, Finding)
    assert (finding.severity, finding.locations) == (Severity.WARNING, (PLACE,))
    assert "they are kept, and never see `epoch`" in finding.title


def test_kept_workers_are_not_blamed_for_other_batches_for_a_fixed_order_and_for_inputs_that_never_change() -> None:
    assert kept_copies(lambda ordinal, step: f"pass {ordinal} batch {step}") == []
    assert kept_copies(lambda ordinal, step: f"batch {step}", stale=()) == []
    assert kept_copies(lambda ordinal, step: "zeros") == []
