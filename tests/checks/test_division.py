"""How data is divided and drawn: samplers, subsets, splits, seeds and evaluation, on records built by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ddpdoctor.checks.data import (
    identical_random_seed,
    missing_distributed_sampler,
    rank_varying_dataset,
    sharded_evaluation_bias,
    unseeded_random_split,
)
from ddpdoctor.checks.launch import wrong_sampler_rank
from ddpdoctor.finding import Finding, Refuted, Severity
from ddpdoctor.record.model import Forward
from ddpdoctor.record.streams.collectives import ReducedCounts
from ddpdoctor.record.streams.setup import Holding, Part, RandomState, Seeding
from ddpdoctor.record.streams.training import Backward, Loader, Pass
from tests.checks.training import LOADER_LINE, probes, training, training_pass
from tests.diagnosis.jobs import SCRIPT, JobBuilder

SAMPLER_LINE = 18
SHARDED: dict[str, Any] = {"sampler_type": "DistributedSampler", "sampler_shards": True, "sampler_replicas": 2}


def sharded(job: JobBuilder, **loader: Any) -> dict[str, Any]:
    """Training whose ranks draw every other sample each."""
    streams = training(job, **SHARDED, sampler_site=job.site(SAMPLER_LINE), **loader)
    streams["loaders"] = tuple(msgspec.structs.replace(entry, sampler_rank=entry.rank) for entry in streams["loaders"])
    streams["passes"] = tuple(
        training_pass(rank, indices=range(rank, 100, 2), index_count=50, index_digest=str(rank)) for rank in job.ranks
    )
    return streams


def state(rank: int, digest: str, library: Any = "torch", **fields: Any) -> RandomState:
    values = {"drawn_from": True, "file": SCRIPT, "line": 8, "end_line": 9, **fields}
    return RandomState(rank=rank, library=library, dataset_type="Images", dataset_length=100, digest=digest, **values)


def seeds(job: JobBuilder, *states: RandomState) -> list[Finding | Refuted]:
    seedings = tuple(Seeding(rank=rank, library="torch", site=job.site(12, 70)) for rank in job.ranks)
    record = job.record(**sharded(job), random_states=states, seedings=seedings)
    return list(identical_random_seed.in_run(record))


def test_generators_in_the_same_state_are_advice_at_the_seed() -> None:
    (finding,) = seeds(
        JobBuilder(2), *(state(rank, "same", library) for rank in (0, 1) for library in ("torch", "numpy"))
    )
    assert isinstance(finding, Finding)
    assert finding.severity is Severity.ADVICE
    assert finding.title.startswith(
        "ranks 0 and 1 apply the same augmentation: torch's and numpy's generators, which the samples"
    )
    assert [(place.line, place.end_line) for place in finding.locations] == [(12, 0), (8, 9)]


def test_generators_that_differ_refute_every_line_on_the_way_to_the_seed() -> None:
    refuted = seeds(JobBuilder(2), state(0, "one"), state(1, "other"))
    assert all(isinstance(result, Refuted) for result in refuted)
    assert [result.location.line for result in refuted if isinstance(result, Refuted)] == [12, 70]


@pytest.mark.parametrize(
    "states",
    [
        (state(0, "same"),),
        (state(0, "same", drawn_from=False), state(1, "same", drawn_from=False)),
        (state(0, "same", worker=0), state(1, "same", worker=1)),
    ],
    ids=["one rank", "nothing drawn", "other workers"],
)
def test_states_that_say_nothing(states: tuple[RandomState, ...]) -> None:
    assert seeds(JobBuilder(2), *states) == []


def test_a_common_seed_over_the_same_samples_is_left_to_the_missing_sampler() -> None:
    job = JobBuilder(2)
    record = job.record(**training(job), random_states=(state(0, "same"), state(1, "same")))
    assert list(identical_random_seed.in_run(record)) == []
    assert len(list(missing_distributed_sampler.in_run(record))) == 1


def parts(job: JobBuilder, rank: int, *indices: Any) -> list[Part]:
    return [
        Part(
            rank=rank,
            part=number,
            site=job.site(15),
            base_type="Images",
            base_length=100,
            count=len(own),
            index_sum=sum(own),
            digest=str(sorted(own)),
        )
        for number, own in enumerate(indices)
    ]


def splits(job: JobBuilder, found: list[Part], samples: dict[int, Any] | None = None) -> list[Finding | Refuted]:
    streams = sharded(job, part=0)
    streams["loaders"] = tuple(
        msgspec.structs.replace(entry, samples=(samples or {}).get(entry.rank, probes()))
        for entry in streams["loaders"]
    )
    return list(unseeded_random_split.in_run(job.record(**streams, parts=tuple(found))))


def test_parts_that_differ_between_ranks_are_an_error() -> None:
    job = JobBuilder(2)
    found = [*parts(job, 0, range(80), range(80, 100)), *parts(job, 1, range(20, 100), range(20))]
    (finding,) = splits(job, found)
    assert isinstance(finding, Finding)
    assert (finding.severity, [place.line for place in finding.locations]) == (Severity.ERROR, [15])
    assert "100 samples into parts of 80 and 20 differently" in finding.title
    (refuted,) = splits(job, found, {1: probes("other {}".format)})
    assert isinstance(refuted, Refuted), "the ranks hold different data"
    assert splits(job, found, {1: ()}) == [], "the data could not be compared"


def test_equal_parts_refute_and_parts_of_each_rank_are_no_split() -> None:
    job = JobBuilder(2)
    (refuted,) = splits(job, [part for rank in (0, 1) for part in parts(job, rank, range(80), range(80, 100))])
    assert isinstance(refuted, Refuted)
    assert splits(job, [part for rank in (0, 1) for part in parts(job, rank, range(rank, 100, 2))]) == []
    assert splits(job, [part for rank in (0, 1) for part in parts(job, rank, range(rank, 60), range(60))]) == []


def varying(job: JobBuilder, streams: dict[str, Any], **more: Any) -> list[Finding | Refuted]:
    return list(rank_varying_dataset.in_run(job.record(**{**streams, **more})))


def test_a_subset_that_was_divided_before_is_divided_twice() -> None:
    job = JobBuilder(2)
    streams = sharded(job, part=0, dataset_type="Subset", dataset_length=50)
    streams["passes"] = tuple(
        training_pass(rank, indices=range(rank, 100, 4), index_count=25, index_digest=str(rank)) for rank in job.ranks
    )
    found = tuple(part for rank in job.ranks for part in parts(job, rank, range(rank, 100, 2)))
    (finding,) = varying(job, streams, parts=found)
    assert isinstance(finding, Finding)
    assert finding.title.endswith("together they draw 50 of 100 samples")
    assert [place.line for place in finding.locations] == [SAMPLER_LINE, LOADER_LINE]
    streams["loaders"] = tuple(
        msgspec.structs.replace(entry, sampler_replicas=1, sampler_rank=0) for entry in streams["loaders"]
    )
    assert varying(job, streams, parts=found) == [], "the sampler does not divide"


def test_a_sampler_within_another_that_divides_leaves_samples_out() -> None:
    job = JobBuilder(2)
    nested = SHARDED | {"sampler_type": "BatchSamplerShard", "sampler_within": "DistributedSampler"}
    streams = training(job, **nested)
    halves = [
        training_pass(rank, indices=range(rank, 100, 4), index_count=25, index_digest=str(rank)) for rank in (0, 2)
    ]
    streams["passes"] = tuple(msgspec.structs.replace(entry, rank=entry.rank // 2) for entry in halves)
    (finding,) = varying(job, streams)
    assert isinstance(finding, Finding)
    assert finding.title == (
        "ranks 0 and 1 together draw 50 of 100 samples in a pass: DistributedSampler divides them by 2, and Accelerate "
        "divides its batches again"
    )
    made_even = [msgspec.structs.replace(one, indices=tuple(range(100)), index_count=100) for one in streams["passes"]]
    assert not any(isinstance(one, Finding) for one in varying(job, streams, passes=tuple(made_even)))
    alone = tuple(msgspec.structs.replace(one, sampler_within="") for one in streams["loaders"])
    assert not any(isinstance(one, Finding) for one in varying(job, streams, loaders=alone)), "fewer by design"


def held(rank: int, ordered: str, unordered: str = "rows") -> Holding:
    return Holding(
        rank=rank,
        dataset_type="Images",
        dataset_length=100,
        attribute="names",
        ordered_digest=ordered,
        unordered_digest=unordered,
    )


def test_the_same_rows_in_another_order_are_a_warning() -> None:
    job = JobBuilder(2)
    streams = sharded(job, samples=())
    (finding,) = varying(job, streams, holdings=(held(0, "a"), held(1, "b")))
    assert isinstance(finding, Finding)
    assert finding.severity is Severity.WARNING
    assert "whose order of samples differs between ranks" in finding.title
    assert varying(job, streams, holdings=(held(0, "a", "x"), held(1, "b", "y"))) == [], "made up on each rank"
    assert varying(job, sharded(job), holdings=(held(0, "a"), held(1, "b"))) == [], "the samples are the same"
    refuted = varying(job, sharded(job), holdings=(held(0, "a"), held(1, "a")))
    assert [type(result) for result in refuted] == [Refuted, Refuted]


def test_another_length_on_each_rank_is_a_warning_unless_its_passes_are_uneven() -> None:
    job = JobBuilder(2)
    streams = sharded(job)
    streams["loaders"] = tuple(
        msgspec.structs.replace(entry, dataset_length=100 + entry.rank) for entry in streams["loaders"]
    )
    (finding,) = varying(job, streams)
    assert isinstance(finding, Finding)
    assert finding.evidence[1].text == "on rank 1 it has 101 samples"
    streams["passes"] = tuple(training_pass(rank, true_length=20 + rank) for rank in job.ranks)
    assert varying(job, streams) == []


def test_samplers_that_were_told_the_same_rank_lose_a_shard() -> None:
    job = JobBuilder(2)
    streams = training(job, **SHARDED, sampler_rank=0, sampler_site=job.site(SAMPLER_LINE))
    record = job.record(**streams)
    (finding,) = wrong_sampler_rank.in_run(record)
    assert isinstance(finding, Finding)
    assert finding.severity is Severity.ERROR
    assert finding.title == (
        "DistributedSampler was given the wrong rank: no rank draws the shard of rank 1, 1/2 of the 100 samples"
    )
    assert [fact.text for fact in finding.evidence] == ["ranks 0 and 1 were given rank 0"]
    assert list(missing_distributed_sampler.in_run(record)) == []


def test_ranks_that_share_a_shard_on_purpose_and_other_sizes_are_left_alone() -> None:
    job = JobBuilder(4)
    pairs = training(job, **SHARDED)
    pairs["loaders"] = tuple(msgspec.structs.replace(entry, sampler_rank=entry.rank // 2) for entry in pairs["loaders"])
    assert list(wrong_sampler_rank.in_run(job.record(**pairs))) == []
    job = JobBuilder(2)
    assert list(wrong_sampler_rank.in_run(job.record(**sharded(job)))) == []
    alone = training(job, **{**SHARDED, "sampler_replicas": 1}, sampler_rank=0)
    assert list(wrong_sampler_rank.in_run(job.record(**alone))) == []


def overlapping(
    shards: list[list[int]], seeds: tuple[int | None, ...] = (None, None), epochs: tuple[int | None, ...] = (0, 0)
) -> list[Finding | Refuted]:
    """A job of two ranks that draw these samples of 100."""
    job = JobBuilder(2)
    streams = sharded(job)
    streams["loaders"] = tuple(
        msgspec.structs.replace(entry, sampler_seed=seeds[entry.rank]) for entry in streams["loaders"]
    )
    streams["passes"] = tuple(
        training_pass(
            rank, indices=shards[rank], index_count=len(shards[rank]), index_digest=str(rank), set_epoch=epochs[rank]
        )
        for rank in job.ranks
    )
    return list(wrong_sampler_rank.in_run(job.record(**streams)))


APART = [list(range(50)), list(range(25, 75))]
"""Half of the samples of each are those of the other, as two independent orders give it."""


def test_shards_that_overlap_by_more_than_their_padding_are_an_error_with_the_cause() -> None:
    (finding,) = overlapping(APART, seeds=(0, 7))
    assert isinstance(finding, Finding)
    assert finding.severity is Severity.ERROR
    assert "25 of 100 samples are drawn by more than one rank and 25 by none" in finding.title
    assert finding.evidence[0].text == "the seed of DistributedSampler differs between ranks: 0 on rank 0, 7 on rank 1"
    (finding,) = overlapping(APART, epochs=(3, 4))
    assert isinstance(finding, Finding)
    assert "the epoch of DistributedSampler differs between ranks: 3 on rank 0, 4 on rank 1" in finding.title
    (finding,) = overlapping(APART)
    assert isinstance(finding, Finding)
    assert "divides an order of its own" in finding.title
    assert overlapping(APART, seeds=(5, 5)) == []  # One order: the ranks' data sets differ, which others report.


def test_padding_repeated_augmentation_and_random_batches_are_no_overlap() -> None:
    padded = [[*range(0, 100, 2), 1], list(range(1, 100, 2))]
    assert overlapping(padded, seeds=(0, 7)) == []
    shared_on_purpose = [list(range(50)), list(range(50))]
    assert overlapping(shared_on_purpose) == []
    random_batches = [list(range(20)), list(range(16, 36))]
    assert overlapping(random_batches) == []
    with_replacement = [[*range(25), *range(25)], [*range(12, 37), *range(12, 37)]]
    assert overlapping(with_replacement) == []


def evaluated(job: JobBuilder, **fields: Any) -> list[Finding | Refuted]:
    """A job that trains on one loader and evaluates on a second one."""
    streams = sharded(job)
    loader = {"dataset_type": "Images", "dataset_length": 40, "samples": probes(), **fields.pop("loader", {})}
    entry = {"true_length": 5, "yielded": 4, "end": "cut", "index_count": 40, "index_digest": "all", **fields}
    own, reduce_op = entry.pop("by_rank", {}), entry.pop("reduce_op", "avg")
    streams["reduced_counts"] = entry.pop("reduced_counts", ())
    streams["loaders"] += tuple(Loader(rank=rank, loader=1, site=job.site(22), **loader) for rank in job.ranks)
    streams["passes"] += tuple(
        Pass(rank=rank, loader=1, ordinal=0, site=job.site(55), **{**entry, **own.get(rank, {})}) for rank in job.ranks
    )
    streams["forwards"] += tuple(Forward(rank=rank, wrap=0, pass_loader=1, time_ns=job.tick()) for rank in job.ranks)
    streams["backwards"] = tuple(Backward(rank=rank) for rank in job.ranks)
    job.call(job.ranks, "all_reduce", 58, reduce_op=reduce_op)
    return list(sharded_evaluation_bias.in_run(job.record(**streams)))


def test_evaluation_of_everything_on_every_rank_is_advice() -> None:
    (finding,) = evaluated(JobBuilder(2))
    assert isinstance(finding, Finding)
    assert (finding.severity, [place.line for place in finding.locations]) == (Severity.ADVICE, [55])
    assert finding.title == "ranks 0 and 1 each evaluate all 40 samples, and get the same result"


def test_averages_over_padded_shards_are_advice() -> None:
    shards = {0: {"index_digest": "0", "index_count": 20}, 1: {"index_digest": "1", "index_count": 21}}
    (finding,) = evaluated(JobBuilder(2), by_rank=shards, loader={**SHARDED})
    assert isinstance(finding, Finding)
    assert finding.title == "the ranks' results are averaged over shards that count 1 of 40 samples twice"


def counted(*numbers: tuple[int, ...], own: tuple[int, ...] = (20, 21), **fields: Any) -> list[str]:
    """What is said of an evaluation of 40 samples in parts of these lengths, after which the ranks sum up numbers."""
    job = JobBuilder(len(own))
    by_rank = {rank: {"index_digest": str(rank), "index_count": length} for rank, length in enumerate(own)}
    rows = tuple(
        ReducedCounts(rank=rank, site=job.site(58), numbers=given) for rank, given in enumerate(numbers) if given
    )
    streams = {"by_rank": by_rank, "reduced_counts": rows, "reduce_op": "sum", "true_length": 1, **fields}
    found = evaluated(job, loader={**SHARDED}, **streams)
    return [finding.title for finding in found if isinstance(finding, Finding)]


@pytest.mark.parametrize(
    ("numbers", "own", "repeated"),
    [
        (((20,), (21,)), (20, 21), 1),
        (((13, 21), (17, 21)), (21, 21), 0),
        (((14,), (14,), (14,)), (14, 14, 14), 2),
        (((20,), (20,)), (20, 20), 0),
        (((19,), (19,)), (19, 19), 0),
        (((20,), (20,)), (20, 21), 0),
        (((20,), ()), (20, 21), 0),
        (((8,), (8,)), (20, 21), 0),
    ],
    ids=[
        "a count",
        "more than a sampler repeats",
        "three ranks",
        "a length that is divisible",
        "drop_last",
        "repeated samples left out",
        "one rank",
        "a pass cut short",
    ],
)
def test_counts_that_take_in_what_the_sampler_repeats(
    numbers: tuple[tuple[int, ...], ...], own: tuple[int, ...], repeated: int
) -> None:
    title = (
        f"40 samples are counted as {40 + repeated}: the sampler repeats {repeated} of them, and the sums over the "
        "ranks take them in"
    )
    assert counted(*numbers, own=own) == ([title] if repeated else [])


def test_divided_evaluation_refutes_and_other_loops_say_nothing() -> None:
    own = {
        rank: {"index_digest": str(rank), "index_count": 20, "indices": tuple(range(rank, 40, 2))} for rank in (0, 1)
    }
    (refuted,) = evaluated(JobBuilder(2), by_rank=own, loader={**SHARDED})
    assert isinstance(refuted, Refuted)
    assert evaluated(JobBuilder(2), backwards=1) == [], "training"
    assert evaluated(JobBuilder(2), index_count=None) == [], "not known"
    assert evaluated(JobBuilder(2), loader={"samples": probes(lambda index: "noise")}) == []
    assert evaluated(JobBuilder(2), true_length=1) == [], "one batch"
