"""What makes steps slow, on records of measured jobs built by hand."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from ddpdoctor.check import TooLittleEvidence
from ddpdoctor.checks.gradients import missing_no_sync
from ddpdoctor.checks.speed import (
    exposed_communication,
    host_sync_in_loop,
    input_bound,
    low_scaling_efficiency,
    slow_link,
    straggler,
)
from ddpdoctor.finding import Finding, Frame, Severity
from ddpdoctor.record.model import Site, TensorInfo, Wrap
from ddpdoctor.record.streams.measured import Gpu, HostRead, Look
from ddpdoctor.record.streams.training import Loader, Pass
from tests.diagnosis.measured_job import MeasuredJob

COMPUTE = {"data_wait": 1.0, "forward": 20.0, "backward": 40.0, "optimizer": 5.0, "other": 2.0}
CHECKS = (exposed_communication, straggler, input_bound)


def said(check: ModuleType, job: MeasuredJob, **streams: Any) -> list[Finding]:
    return list(check.in_run(job.record(**streams)))


def codes(job: MeasuredJob) -> list[str]:
    return [finding.code for check in CHECKS for finding in said(check, job)]


def test_a_job_that_computes_has_no_finding() -> None:
    assert codes(MeasuredJob(4).run(60, COMPUTE, transfer=4.0, hidden=30.0)) == []


@pytest.mark.parametrize("check", CHECKS)
def test_a_few_steps_are_not_judged(check: ModuleType) -> None:
    with pytest.raises(
        TooLittleEvidence, match=r"^16 steps were measured after the warm-up, and at least 20 are needed$"
    ):
        said(check, MeasuredJob(2).run(19, {"data_wait": 50.0, "forward": 10.0}, transfer=50.0))


def test_gradients_on_their_way_are_exposed_communication() -> None:
    job = MeasuredJob(2).run(60, {**COMPUTE, "backward": 10.0}, transfer=62.0, hidden=5.0)
    (finding,) = said(exposed_communication, job)
    assert finding.title == "backward waits for gradient transfer for 62% of the step (62.0 ms of 100 ms)"
    assert finding.severity is Severity.WARNING
    assert finding.evidence[0].text == (
        "gradients of all 2 ranks: 40.0 MB in 4 buckets a step, at least 597 MB/s on the bus"
    )
    assert codes(job) == ["DDP401"]


def test_what_a_long_backward_does_not_hide_is_poor_overlap_as_well() -> None:
    job = MeasuredJob(2).run(60, COMPUTE, transfer=32.0, hidden=5.0, buckets=1)
    _, finding = said(exposed_communication, job)
    assert finding.severity is Severity.ADVICE
    assert finding.title == (
        "14% of the communication of gradients is hidden, although backward computes for 40.0 ms a step and 32.0 ms "
        "of transfer are exposed"
    )
    assert "bucket_cap_mb" in finding.remedy
    assert codes(job) == ["DDP401", "DDP401"]


def test_one_long_wait_does_not_make_the_figures_of_a_loader_that_is_a_little_slow() -> None:
    slow = {**COMPUTE, "data_wait": 20.0}
    job = MeasuredJob(2).run(30, slow).run(1, {**COMPUTE, "data_wait": 20_000.0}).run(30, slow)
    (finding,) = said(input_bound, job)
    assert finding.title == "training waits for data for 23% of the step (20.0 ms of 87.0 ms)"
    assert [fact.text for fact in finding.evidence] == [
        "rank 0 waits longest, 20.0 ms a step",
        "these are the figures of the quarter of the steps in the middle; with single long waits it is 84% of all "
        "steps together",
    ]


def test_one_slow_transfer_does_not_make_the_figures_of_the_gradients_nor_one_delay_those_of_a_straggler() -> None:
    computing = {**COMPUTE, "backward": 10.0}
    job = MeasuredJob(2).run(30, computing, transfer=12.0).run(1, computing, transfer=9_000.0)
    (finding,) = said(exposed_communication, job.run(30, computing, transfer=12.0))
    assert finding.title == "backward waits for gradient transfer for 24% of the step (12.0 ms of 50.0 ms)"
    late = {1: {"forward": 10.0}}
    delayed = MeasuredJob(2).run(80, COMPUTE, late).run(1, COMPUTE, {1: {"forward": 120.0}}).run(80, COMPUTE, late)
    (finding,) = said(straggler, delayed)
    assert finding.title == "rank 1 keeps rank 0 waiting for 13% of the step (10.0 ms) because of its forward"


def looks(rank: int, phase: str, *at: tuple[int, int]) -> dict[str, Any]:
    """Lines, each with how often the rank was met there."""
    sites = tuple(Site(frames=(Frame("/job/train.py", line, "step"),)) for line, _ in at)
    rows = (Look(rank=rank, site=number, phase=phase, looks=count) for number, (_, count) in enumerate(at))
    return {"sites": sites, "looks": tuple(rows)}


def test_a_straggler_is_named_with_the_line_at_which_it_mostly_stood() -> None:
    job = MeasuredJob(2).run(60, COMPUTE, {1: {"other": 40.0}})
    (finding,) = said(straggler, job, **looks(1, "other", (32, 12), (40, 5)))
    assert finding.location is not None and finding.location.line == 32
    assert finding.title.endswith(" at train.py:32 (step)")


def below(phase: str, *chains: tuple[int, tuple[tuple[int, str], ...]], sites: tuple[Site, ...] = ()) -> dict[str, Any]:
    """Call chains of rank 1, innermost first, each with how often it was met, beside sites of something else."""
    own = tuple(Site(frames=tuple(Frame("/job/train.py", line, name) for line, name in frames)) for _, frames in chains)
    rows = (Look(rank=1, site=number, phase=phase, looks=chains[number][0]) for number in range(len(own)))
    return {"sites": own + sites, "looks": tuple(rows)}


MAIN = ((54, "main"), (70, "<module>"))
REPAIR = tuple((3, ((line, "repair"), (35, "__iter__"), *MAIN)) for line in (17, 19, 20, 23))
LOOP = (Site(frames=tuple(Frame("/job/train.py", line, name) for line, name in MAIN)),)


def test_a_line_that_called_what_the_looks_met_is_named_and_not_the_loop_around_it() -> None:
    job = MeasuredJob(2).run(60, COMPUTE, {1: {"data_wait": 40.0}})
    (finding,) = said(straggler, job, **below("data_wait", *REPAIR, sites=LOOP))
    assert finding.title.endswith(" at train.py:35 (__iter__)")
    assert finding.evidence[2].text.endswith("in 12 of 12 looks during that time")


def test_the_loop_is_not_named_where_its_own_lines_are_met_by_turns() -> None:
    job = MeasuredJob(2).run(60, COMPUTE, {1: {"data_wait": 40.0}})
    lines = tuple((6, ((line, "main"), (70, "<module>"))) for line in (54, 55, 56, 57))
    (finding,) = said(straggler, job, **below("data_wait", *lines, sites=LOOP))
    assert finding.location is None


def test_the_line_behind_a_loop_of_python_does_not_hide_it() -> None:
    job = MeasuredJob(2).run(60, COMPUTE, {1: {"data_wait": 40.0}})
    (finding,) = said(straggler, job, **below("data_wait", (14, ((36, "__iter__"), *MAIN)), *REPAIR, sites=LOOP))
    assert finding.evidence[2].text == (
        "rank 1 stood at train.py:36 (__iter__) in 14 of 26 looks during that time, and at train.py:35 (__iter__) in 12"
    )


@pytest.mark.parametrize(
    "seen",
    [
        looks(1, "other", (32, 4)),
        looks(0, "other", (32, 40)),
        looks(1, "optimizer", (32, 40)),
        looks(1, "other", (32, 9), (33, 9), (34, 9)),
    ],
)
def test_a_line_that_was_hardly_met_or_by_others_or_elsewhere_is_not_named(seen: dict[str, Any]) -> None:
    (finding,) = said(straggler, MeasuredJob(2).run(60, COMPUTE, {1: {"other": 40.0}}), **seen)
    assert finding.location is None


def test_a_straggler_is_named_with_its_phase_and_nothing_is_laid_to_the_link() -> None:
    job = MeasuredJob(4).run(60, COMPUTE, {2: {"data_wait": 25.0}}, transfer=4.0, hidden=30.0)
    (finding,) = said(straggler, job)
    assert finding.ranks == (2,)
    assert finding.title == "rank 2 keeps the others waiting for 26% of the step (25.0 ms) because of its loader"
    assert [fact.text for fact in finding.evidence] == [
        "ranks 0, 1 and 3 wait 25.0 ms of each step longer than rank 2",
        "data wait takes 26.0 ms of a step on rank 2, and 1.0 ms on the others",
    ]
    assert codes(job) == ["DDP403"]


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer", "other"])
def test_a_straggler_of_two_is_known_in_every_phase(phase: str) -> None:
    (finding,) = said(straggler, MeasuredJob(2).run(60, COMPUTE, {0: {phase: 20.0}}))
    assert finding.title.startswith("rank 0 keeps rank 1 waiting for 23% of the step (20.0 ms) because of ")


def test_a_rank_that_is_slower_in_everything_is_advice() -> None:
    slow = {"data_wait": 2.0, "forward": 4.0, "backward": 4.0, "optimizer": 4.0}
    (finding,) = said(straggler, MeasuredJob(2).run(60, COMPUTE, {1: slow}))
    assert finding.title == "rank 1 keeps rank 0 waiting for 17% of the step (14.0 ms), slower in every phase"
    assert finding.severity is Severity.ADVICE


def test_a_rank_that_computes_more_than_the_others_is_told_from_a_slow_machine() -> None:
    longer_samples = {"data_wait": 3.0, "forward": 10.0, "backward": 10.0, "optimizer": 1.0}
    (finding,) = said(straggler, MeasuredJob(2).run(60, COMPUTE, {1: longer_samples}))
    assert finding.title.endswith("(24.0 ms) because of its forward and backward")
    assert (finding.severity, finding.evidence[1].text) == (
        Severity.WARNING, "computation takes 80.0 ms of a step on rank 1, and 60.0 ms on the others",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("slower", "cause"),
    [
        ({"forward": 14.0, "backward": 20.0}, "its forward and backward"),
        ({"forward": 20.0, "backward": 9.0}, "its forward and backward"),
        ({"forward": 2.0, "backward": 30.0}, "its backward"),
        ({"forward": 30.0, "backward": 2.0}, "its forward"),
        ({"forward": 5.0, "backward": 6.0, "other": 30.0}, "code outside of forward, backward and optimizer"),
        ({"forward": 8.0, "backward": 16.0, "optimizer": 6.0}, "its backward"),
    ],
)
def test_longer_samples_are_laid_to_forward_and_backward_and_a_delay_to_where_it_is(
    slower: dict[str, float], cause: str
) -> None:
    (finding,) = said(straggler, MeasuredJob(2).run(60, COMPUTE, {1: slower}))
    assert finding.title.endswith(f"because of {cause}")


def test_what_other_programs_cost_a_rank_for_some_seconds_makes_no_straggler() -> None:
    assert [codes(MeasuredJob(2).run(steps, COMPUTE, {1: {"forward": 10.0}})) for steps in (60, 160)] == [
        [],
        ["DDP403"],
    ]


def test_a_slow_half_of_the_ranks_is_found_together() -> None:
    slow = {rank: {"forward": 30.0} for rank in (2, 3)}
    (finding,) = said(straggler, MeasuredJob(4).run(60, COMPUTE, slow))
    assert (
        finding.title == "ranks 2 and 3 keep the others waiting for 31% of the step (30.0 ms) because of their forward"
    )


def test_ranks_that_take_turns_are_no_stragglers() -> None:
    job = MeasuredJob(2)
    for step in range(60):
        job.run(1, COMPUTE, {step % 2: {"forward": 60.0}})
    assert codes(job) == ["DDP401"]
    (finding,) = said(exposed_communication, job)
    assert finding.title == (
        "the ranks wait for each other for 23% of the step (30.0 ms of 128 ms), taking turns being late"
    )


def test_one_long_delay_is_no_straggler_and_some_jitter_is_nothing() -> None:
    job = MeasuredJob(2).run(30, COMPUTE).run(1, COMPUTE, {1: {"other": 900.0}}).run(30, COMPUTE)
    assert codes(job) == []
    jittering = MeasuredJob(2)
    for step in range(60):
        jittering.run(1, COMPUTE, {step * 7 % 5 % 2: {"forward": 3.0 * (step % 4)}})
    assert codes(jittering) == []


def test_a_project_sets_its_own_threshold() -> None:
    def job(share: float) -> MeasuredJob:
        return MeasuredJob(2, thresholds={"straggler": share}).run(160, COMPUTE, {1: {"forward": 10.0}})

    assert (codes(job(0.05)), codes(job(0.3))) == (["DDP403"], [])


def test_waiting_for_data_names_the_loader_and_its_workers() -> None:
    job = MeasuredJob(2).run(60, {**COMPUTE, "data_wait": 20.0})
    frame = Frame("/job/train.py", 20, "main")
    streams: dict[str, Any] = {
        "sites": (Site((frame,)),),
        "loaders": tuple(
            Loader(rank=rank, loader=loader, site=0 if loader else -1, workers=2 * loader)
            for rank in (0, 1)
            for loader in (0, 1)
        ),
        "passes": (Pass(rank=0, loader=1, ordinal=0, backwards=60), Pass(rank=0, loader=0, ordinal=0, backwards=1)),
    }
    (finding,) = said(input_bound, job, **streams)
    assert finding.title == "training waits for data for 23% of the step (20.0 ms of 87.0 ms)"
    assert finding.remedy.startswith("The 2 workers of each rank do not keep up")
    assert finding.location is not None and finding.location.line == 20
    assert codes(job) == ["DDP404"]


def test_the_start_of_workers_at_the_beginning_of_epochs_is_no_wait_for_data() -> None:
    job = MeasuredJob(2)
    for _ in range(2):
        job.run(1, {**COMPUTE, "data_wait": 400.0}).run(40, COMPUTE)
    assert codes(job) == []


@pytest.mark.parametrize(("persistent", "remedy"), [(False, "persistent_workers=True"), (True, "kept already")])
def test_workers_that_start_anew_for_each_epoch_are_told_apart_from_slow_ones(persistent: bool, remedy: str) -> None:
    job = MeasuredJob(2)
    for _ in range(8):
        job.run(1, {**COMPUTE, "data_wait": 4_000.0}).run(9, COMPUTE)
    loaders = tuple(Loader(rank=rank, loader=0, workers=2, length=10, persistent=persistent) for rank in (0, 1))
    passes = (Pass(rank=0, loader=0, ordinal=0, backwards=80),)
    (finding,) = said(input_bound, job, loaders=loaders, passes=passes)
    assert remedy in finding.remedy and "do not keep up" not in finding.remedy
    assert any("the first batch of each epoch" in fact.text for fact in finding.evidence)


def test_explicit_collectives_count_without_the_waiting_and_without_barriers() -> None:
    def job(kind: str, late: float, transfer: float) -> MeasuredJob:
        job = MeasuredJob(2, kinds=("barrier", "all_reduce", "broadcast"))
        for _ in range(60):
            job.run(1, {**COMPUTE, "other": 60.0}, explicit_ns=int((late + transfer) * 1e6))
            for rank in job.ranks:
                end = job.now_ms[rank] - 1.0
                job.call(rank, kind, end - transfer - (0.0 if rank else late), end, size_bytes=1_000)
        return job

    (finding,) = said(exposed_communication, job("all_reduce", 1.0, 40.0))
    assert finding.title.startswith("collectives outside of backward (all_reduce) take 32% of the step")
    assert "broadcast_buffers" not in finding.remedy
    (finding,) = said(exposed_communication, job("broadcast", 1.0, 40.0))
    assert "broadcast_buffers" not in finding.remedy
    wrap = Wrap(rank=0, wrap=0, options={"broadcast_buffers": True}, buffers=(TensorInfo(name="mean"),))
    (finding,) = said(exposed_communication, job("broadcast", 1.0, 40.0), wraps=(wrap,))
    assert "broadcast_buffers" in finding.remedy
    assert said(exposed_communication, job("all_reduce", 40.0, 1.0)) == []
    assert said(exposed_communication, job("barrier", 1.0, 40.0)) == []


@pytest.mark.parametrize(
    ("units", "unit_bytes", "remedy"),
    [
        (1, 80_000_000, "Call fully_shard on each layer as well as on the model"),
        (6, 100_000, "Call fully_shard on groups of layers instead of single ones: units of 100 kB cost latency"),
        (6, 80_000_000, "Send less: larger batches"),
    ],
)
def test_what_helps_a_sharded_job_follows_from_the_units_that_are_gathered(
    units: int, unit_bytes: int, remedy: str
) -> None:
    job = MeasuredJob(2, kinds=("barrier", "all_gather_into_tensor", "reduce_scatter_tensor"))
    kinds = [*["all_gather_into_tensor"] * (2 * units), *["reduce_scatter_tensor"] * units]
    took = 45.0 / len(kinds)
    for _ in range(60):
        for rank in job.ranks:
            for number, kind in enumerate(kinds):
                at = job.now_ms[rank] + number * took
                job.call(rank, kind, at, at + took, size_bytes=unit_bytes)
        job.run(1, {**COMPUTE, "other": 60.0}, explicit_ns=45_000_000)
    findings = said(exposed_communication, job)
    assert [finding.remedy for finding in findings if finding.remedy.startswith(remedy)]


def on_gpus(job: MeasuredJob, nvlink: float | None = 100e9) -> dict[str, Any]:
    return {
        "gpus": tuple(
            Gpu(index=rank, name="GPU", ranks=(rank,), nvlink_bytes_per_s=nvlink, pcie_bytes_per_s=30e9)
            for rank in job.ranks
        )
    }


def test_a_link_far_from_its_speed_is_told_beside_what_a_ring_would_take() -> None:
    job = MeasuredJob(4, backend="nccl").run(60, {**COMPUTE, "backward": 10.0}, transfer=10.0)
    (finding,) = said(slow_link, job, **on_gpus(job))
    assert finding.title == (
        "gradients of all 4 ranks move at 6.0 GB/s on the bus, 6% of what NVLink carries (100 GB/s)"
    )
    assert finding.evidence[0].text == (
        "40.0 MB a step take 10.0 ms; a ring over this link takes 0.60 ms at full speed"
    )
    assert said(slow_link, job, **on_gpus(job, None)) == []
    assert said(slow_link, job) == []
    small = MeasuredJob(4, backend="nccl").run(60, COMPUTE, transfer=10.0, reduced_bytes=1_000_000)
    assert said(slow_link, small, **on_gpus(small)) == []


def test_scaling_is_judged_against_a_recorded_run_on_one_rank_only() -> None:
    def job(one: float | None) -> MeasuredJob:
        return MeasuredJob(4, one_rank_samples_per_s=one).run(60, COMPUTE, transfer=4.0)

    (finding,) = said(low_scaling_efficiency, job(600.0))
    assert finding.title == "4 ranks train 1,778 samples/s, 74% of 4 times the 600 samples/s of one rank"
    assert said(low_scaling_efficiency, job(460.0)) == []
    with pytest.raises(TooLittleEvidence, match="profile --one-rank RUN"):
        said(low_scaling_efficiency, job(None))


def accumulating(samples: int, synchronised: int, wraps: int = 1) -> list[Finding]:
    job = MeasuredJob(2).run(60, COMPUTE, samples=samples, synchronised=synchronised, micro_batches=4)
    streams: dict[str, Any] = {
        "loaders": tuple(Loader(rank=rank, loader=0, batch_size=8) for rank in job.ranks),
        "passes": tuple(Pass(rank=rank, loader=0, ordinal=0, backwards=240) for rank in job.ranks),
        "wraps": tuple(
            Wrap(
                rank=rank,
                wrap=wrap,
                module_class="Net",
                parameters=(TensorInfo(name="weight", size_bytes=4_000_000, requires_grad=True),),
            )
            for rank in job.ranks
            for wrap in range(wraps)
        ),
    }
    return [item for item in missing_no_sync.in_run(job.record(**streams)) if isinstance(item, Finding)]


def test_micro_batches_that_all_synchronise_are_told_with_what_they_waste() -> None:
    (finding,) = accumulating(samples=32, synchronised=4)
    assert finding.title == (
        "4 backward passes before each optimizer step synchronise all gradients of Net: 12.0 MB a step are sent for "
        "nothing"
    )
    assert finding.evidence[0].text == "60 of 60 optimizer steps came after several reductions"


def test_accumulation_under_no_sync_and_several_backwards_of_a_batch_are_right() -> None:
    assert accumulating(samples=32, synchronised=1) == []
    assert accumulating(samples=8, synchronised=2) == []
    assert accumulating(samples=32, synchronised=4, wraps=2) == []


def test_a_rank_that_is_late_now_and_then_by_chance_is_no_straggler() -> None:
    job = MeasuredJob(2)
    for step in range(60):
        job.run(1, COMPUTE, {1: {"forward": 150.0 * (step % 15 == 7)}})
    assert codes(job) == []


def test_one_slow_transfer_does_not_make_a_run_slow() -> None:
    job = MeasuredJob(2).run(30, COMPUTE).run(1, COMPUTE, transfer=900.0).run(30, COMPUTE)
    assert codes(job) == []


def test_ranks_that_take_turns_have_to_lose_twice_what_gradients_may() -> None:
    job = MeasuredJob(2)
    for step in range(60):
        job.run(1, COMPUTE, {step % 2: {"forward": 40.0}})
    assert codes(job) == []


def test_waiting_for_a_straggler_is_laid_to_it_alone() -> None:
    assert codes(MeasuredJob(4).run(60, COMPUTE, {2: {"forward": 60.0}})) == ["DDP403"]


def read_back(*reads: tuple[int, str, int, int, float], line: int = 12) -> list[Finding]:
    """What is said of reads: rank, method, steps with one, steps sampled, milliseconds of waiting per step."""
    job = MeasuredJob(2, device="cuda", backend="nccl").run(60, COMPUTE)
    sampled = tuple(
        HostRead(
            rank=rank,
            site=0,
            method=method,
            calls=2 * with_,
            steps_with=with_,
            steps=steps,
            wait_ns=int(wait * 1e6 * steps),
        )
        for rank, method, with_, steps, wait in reads
    )
    record = job.record(host_reads=sampled, sites=(Site((Frame("/job/train.py", line, "main"),)),))
    return [item for item in host_sync_in_loop.in_run(record) if isinstance(item, Finding)]


def test_a_read_in_every_step_is_advice_with_its_line_and_what_it_waits() -> None:
    (finding,) = read_back((0, "item", 20, 20, 3.0), (1, "item", 19, 20, 2.0), (0, "__bool__", 20, 20, 1.0))
    assert finding.title == ".item() waits for the GPU in every step, 3.0 ms each (one of 2 places)"
    assert (finding.severity, finding.ranks) == (Severity.ADVICE, (0, 1))
    assert [place.line for place in finding.locations] == [12]
    assert finding.evidence[1].text.startswith(
        "the truth value of a tensor in 20 of 20 sampled steps, 2.0 times per step"
    )
    for read in (
        (0, "item", 17, 20, 3.0),  # not in every step
        (0, "item", 9, 9, 3.0),  # too few steps
        (0, "item", 20, 20, 0.01),  # hardly waits
    ):
        assert read_back(read) == []
