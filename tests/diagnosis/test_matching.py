from __future__ import annotations

import time
from array import array
from typing import Any

import msgspec
import pytest

from ddpdoctor.diagnosis.divergence.matching import Matcher, disagreement
from ddpdoctor.record.model import Forward, RunRecord
from ddpdoctor.record.streams.collectives import CollectiveTrack, Signature
from tests.diagnosis.jobs import JobBuilder, healthy_job


def test_a_healthy_job_has_no_parting() -> None:
    assert Matcher().advance(healthy_job(4).record()) is None


def signature(kind: str, numel: int = 8, **fields: Any) -> Signature:
    return Signature(kind=kind, numels=(numel,), **{"dtype": "float32", **fields})


def gathered(module: str, **fields: Any) -> Signature:
    return signature("all_gather_into_tensor", module=module, **{"origin": "fsdp-forward", **fields})


@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [
        (signature("all_reduce"), signature("broadcast"), "kind of collective"),
        (signature("all_reduce", 8), signature("all_reduce", 9), "number of elements"),
        (signature("all_reduce"), signature("all_reduce", dtype="float16"), "dtype"),
        (signature("all_reduce", reduce_op="sum"), signature("all_reduce", reduce_op="max"), "reduce operation"),
        (signature("broadcast", root=0), signature("broadcast", root=1), "root"),
        (signature("all_gather", 8), signature("all_gather", 9), "number of elements"),
        (gathered("layers.0"), gathered("layers.1"), "sharded module"),
        (gathered("layers.0"), gathered("layers.0", origin="fsdp-eval"), "phase of the sharded module"),
        (gathered("layers.0"), gathered("layers.0", origin="fsdp-backward"), "phase of the sharded module"),
    ],
)
def test_what_must_agree_is_named(one: Signature, other: Signature, difference: str) -> None:
    assert disagreement(one, other, "gloo") == difference


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (signature("gather", 8, root=0), signature("gather", 80, root=0)),
        (signature("scatter", 8, root=0), signature("scatter", 80, root=0)),
        (signature("all_to_all_single", 8), signature("all_to_all_single", 12)),
        (signature("all_gather", 8), signature("all_gather_into_tensor", 16)),
        (signature("all_reduce", shapes=((2, 4),)), signature("all_reduce", shapes=((8,),))),
        (signature("all_reduce", origin="join"), signature("all_reduce", origin="ddp-backward")),
        (gathered("layers.0"), gathered("layers.0")),
        (gathered("layers.0"), gathered("")),
        (gathered("", origin="user"), gathered("")),
    ],
)
def test_what_may_differ_fits(one: Signature, other: Signature) -> None:
    assert disagreement(one, other, "gloo") == ""


def test_uneven_lists_are_legal_with_nccl_only() -> None:
    assert disagreement(signature("all_gather", 8), signature("all_gather", 9), "nccl") == ""


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_a_list_whose_tensors_have_one_size_serves_no_other_size_with_nccl_either(kind: str) -> None:
    one, other = signature(kind, 8, uneven=False), signature(kind, 9, uneven=False)
    assert disagreement(one, other, "nccl") == "number of elements"
    assert disagreement(signature(kind, 8, uneven=True), signature(kind, 9, uneven=True), "nccl") == ""


def test_a_gather_into_one_tensor_has_one_size_with_nccl_too() -> None:
    one, other = signature("all_gather_into_tensor", 8), signature("all_gather_into_tensor", 9)
    assert disagreement(one, other, "nccl") == "number of elements"


def test_point_to_point_takes_no_part_in_the_sequence() -> None:
    job = JobBuilder(3)
    job.call(job.ranks, "all_reduce", 10)
    job.call(0, "send", 20, 500)
    job.call(1, "recv", 21, 500)
    job.call(job.ranks, "all_reduce", 30, 7)
    job.call((0, 1), "all_reduce", 40, 7)
    assert Matcher().advance(job.record()) is None


def test_groups_are_paired_apart() -> None:
    job = JobBuilder(4)
    rows, columns = job.group(0, 1), job.group(0, 2)
    job.call((0, 1), "all_reduce", 10, 5, group=rows)
    job.call((0, 2), "broadcast", 11, 9, group=columns, root=0)
    job.call(job.ranks, "barrier", 12)
    assert Matcher().advance(job.record()) is None
    job.call(0, "all_reduce", 13, 5, group=rows)
    job.call(1, "all_reduce", 13, 6, group=rows)
    parting = Matcher().advance(job.record())
    assert parting is not None
    assert (parting.group, parting.position, parting.difference) == (rows, 1, "number of elements")


def test_a_rank_that_is_behind_is_no_parting_until_it_comes() -> None:
    job, matcher = JobBuilder(3), Matcher()
    for line in (10, 11, 12):
        job.call(0, "all_reduce", line, line)
    assert matcher.advance(job.record()) is None
    job.call(1, "all_reduce", 10, 10)
    job.call(2, "all_reduce", 10, 10)
    assert matcher.advance(job.record()) is None
    job.call(2, "all_reduce", 11, 11)
    job.call(2, "all_reduce", 12, 12)
    job.call(2, "all_reduce", 13, 13)
    assert matcher.advance(job.record()) is None
    job.call(1, "all_reduce", 11, 11)
    job.call(1, "barrier", 99, 1)
    parting = matcher.advance(job.record())
    assert parting is not None
    assert parting.position == 2
    assert 1 in parting.ranks


def test_ranks_that_overtake_each_other_are_all_compared() -> None:
    job, matcher = JobBuilder(3), Matcher()
    job.call(0, "all_reduce", 10, 10)
    assert matcher.advance(job.record()) is None
    job.call((1, 2), "all_reduce", 10, 10)
    job.call(1, "all_reduce", 11, 11)
    job.call(2, "all_reduce", 11, 12)
    assert matcher.advance(job.record()) is not None


def test_gradients_of_different_steps_are_a_desync_only_for_one_module() -> None:
    job = JobBuilder(2)
    job.step(0, 3)
    job.step(1, 4)
    job.call(job.ranks, "all_reduce", 60)
    assert Matcher().advance(job.record()) is None
    job.step(1, 4, line=41)
    job.reduce_gradients(job.ranks)
    assert Matcher().advance(job.record()) is None
    job.step(1, 4)
    job.reduce_gradients(job.ranks)
    parting = Matcher().advance(job.record())
    assert parting is not None
    assert (parting.form, parting.position) == ("desync", 2)


def test_ranks_may_accumulate_over_different_numbers_of_micro_batches() -> None:
    job = JobBuilder(2)
    job.step(0, 4)
    job.step(1, 6)
    job.reduce_gradients(job.ranks)
    forwards = [
        Forward(rank=rank, wrap=0, site=job.site(40), step=step, synchronised=step in (count // 2, count))
        for rank, count in ((0, 4), (1, 6))
        for step in range(1, count + 1)
    ]
    assert Matcher().advance(job.record(forwards=tuple(forwards))) is None
    assert Matcher().advance(job.record(forwards=tuple(forwards[:-1]))) is None
    forwards[0] = msgspec.structs.replace(forwards[0], synchronised=True)
    assert Matcher().advance(job.record(forwards=tuple(forwards))) is not None
    assert Matcher().advance(job.record()) is not None


def test_a_joined_rank_shadows_the_others() -> None:
    job = JobBuilder(2)
    job.step(0, 5)
    job.step(1, 4)
    job.reduce_gradients(0)
    job.call(1, "all_reduce", 70, 100, origin="join", reduce_op="sum")
    assert Matcher().advance(job.record()) is None


def test_ranks_that_joined_earlier_may_have_made_fewer_steps() -> None:
    job = JobBuilder(2)
    job.step(0, 5)
    job.step(1, 4)
    job.call(job.ranks, "all_reduce", 40, 1, origin="join")
    job.reduce_gradients(job.ranks)
    assert Matcher().advance(job.record()) is None


def test_what_follows_our_own_ending_is_no_evidence() -> None:
    job = healthy_job()
    job.leave(0, "ended-by-rehearsal")
    job.call(0, "barrier", 90)
    job.call(1, "all_reduce", 60)
    assert Matcher().advance(job.record()) is None


def test_a_track_that_lost_its_beginning_is_paired_by_its_sequence() -> None:
    job = JobBuilder(2)
    for numel in range(10):
        job.call(job.ranks, "all_reduce", 10, numel)
    for column in job.columns[1].values():
        del column[:4]
    assert Matcher().advance(job.record()) is None


def big_record(ranks: int, entries: int) -> RunRecord:
    job = healthy_job(ranks)
    base = job.record()
    tracks = tuple(
        CollectiveTrack(
            rank=rank,
            **{name: array("q", base.collectives[rank].__getattribute__(name)[:1] * entries) for name in SAME},
            started_ns=array("q", range(entries)),
            completed_ns=array("q", range(entries)),
        )
        for rank in range(ranks)
    )
    return RunRecord(
        job=base.job,
        sites=base.sites,
        signatures=base.signatures,
        ranks=base.ranks,
        groups=base.groups,
        collectives=tracks,
    )


SAME = ("group", "sequence", "signature", "site", "step", "forward_site")


def test_two_million_entries_on_eight_ranks_are_matched_in_two_seconds() -> None:
    record = big_record(8, 250_000)
    matcher = Matcher()
    start = time.process_time()
    assert matcher.advance(record) is None
    assert time.process_time() - start < 2
    start = time.process_time()
    assert matcher.advance(record) is None
    assert time.process_time() - start < 0.05
