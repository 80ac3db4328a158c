"""Checks that compare a rehearsal with the machines of its job, on records built by hand."""

from __future__ import annotations

from typing import Any

import pytest

from ddpdoctor.check import NotStated
from ddpdoctor.checks.gradients import model_state_too_large
from ddpdoctor.checks.launch import cpu_oversubscription
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.record.model import RunRecord, TensorInfo, Wrap
from ddpdoctor.record.streams.measured import OptimizerSize
from ddpdoctor.record.streams.setup import CpuThreads, JobMachine, Setting
from ddpdoctor.record.streams.training import Loader, OptimizerStep, Pass
from tests.checks.training import LOADER_LINE, WRAP_LINE, training
from tests.diagnosis.jobs import JobBuilder

GIB = 1 << 30
H100 = JobMachine(device_memory_bytes=80 * GIB, cores=64, ranks_per_node=8, may_use_gpus=True)


def state(
    machine: JobMachine, trained_gib: float = 12, *, frozen_gib: float = 0, ranks_of_job: int = 0, **size: Any
) -> RunRecord:
    """Two ranks that step AdamW over weights of so many GiB, beside frozen ones."""
    built = JobBuilder(2, machine=machine, ranks_of_job=ranks_of_job)
    trained, frozen = int(trained_gib * GIB), int(frozen_gib * GIB)
    sizes = {"parameter_bytes": trained, "gradient_bytes": trained, "state_bytes": 2 * trained, **size}
    parameters = (
        TensorInfo(name="head", size_bytes=trained, requires_grad=True),
        TensorInfo(name="body", size_bytes=frozen),
    )
    # Wrapped again for the next phase: there is only one model.
    wraps = tuple(
        Wrap(
            rank=rank,
            wrap=number,
            site=built.site(WRAP_LINE),
            options={"gradient_as_bucket_view": False},
            parameters=parameters,
            buffers=(TensorInfo(name="mean", size_bytes=GIB // 2),),
        )
        for rank in built.ranks
        for number in (0, 1)
    )
    return built.record(
        wraps=wraps,
        optimizer_steps=tuple(OptimizerStep(rank=rank, optimizer=0, wraps=(0,)) for rank in built.ranks),
        optimizer_sizes=tuple(OptimizerSize(rank=rank, type="AdamW", **sizes) for rank in built.ranks),
    )


def found(check: Any, record: RunRecord) -> Finding | None:
    findings = list(check.in_run(record))
    assert len(findings) <= 1
    return findings[0] if findings else None


def test_a_state_that_takes_most_of_the_stated_memory_is_a_warning_with_its_parts() -> None:
    finding = found(model_state_too_large, state(H100))
    assert finding is not None
    assert (finding.severity, finding.ranks, finding.locations[0].line) == (Severity.WARNING, (), WRAP_LINE)
    assert finding.title == "weights, gradients and optimizer take 76% of the GPU's memory"
    assert [fact.text for fact in finding.evidence] == [
        "weights: 12.0 GiB of 80 GiB",
        "buffers: 512.0 MiB of 80 GiB",
        "gradients: 12.0 GiB of 80 GiB",
        "DDP's buckets: 12.0 GiB of 80 GiB",
        "the state of AdamW: 24.0 GiB of 80 GiB",
        "19.5 GiB are left for the activations of a batch",
        "`device-memory-gib` in [tool.ddpdoctor.job] gives a GPU 80 GiB",
    ]
    over = found(model_state_too_large, state(H100, 20))
    assert over is not None
    assert over.evidence[-2].text == "it does not fit: 20.5 GiB are missing, not counting the activations of a batch"


def test_weights_that_no_optimizer_steps_count() -> None:
    finding = found(model_state_too_large, state(H100, 1, frozen_gib=50))
    assert finding is not None
    assert finding.evidence[0].text == "weights: 51.0 GiB of 80 GiB"


def test_the_memory_of_the_gpu_that_was_rehearsed_on_counts_unless_another_is_stated() -> None:
    here = JobMachine(may_use_gpus=True)
    assert found(model_state_too_large, state(here, 2, device_memory_bytes=12 * GIB)) is not None
    assert found(model_state_too_large, state(here, 2, device_memory_bytes=40 * GIB)) is None
    assert found(model_state_too_large, state(H100, 2, device_memory_bytes=12 * GIB)) is None


def test_a_state_that_is_divided_counts_by_the_ranks_of_the_job() -> None:
    # 12 GiB of weights, 12 of gradients, 12 of buckets, and 24 on each of two ranks: 6 on each of eight.
    assert found(model_state_too_large, state(H100, shares_state=True)) is None
    two = JobMachine(device_memory_bytes=80 * GIB, ranks_per_node=2, may_use_gpus=True)
    finding = found(model_state_too_large, state(two, shares_state=True))
    assert finding is not None
    assert finding.remedy == "Shard the weights and gradients, too: with FSDP."
    assert found(model_state_too_large, state(two, ranks_of_job=16, shares_state=True)) is None
    unknown = JobMachine(device_memory_bytes=80 * GIB, may_use_gpus=True)
    assert found(model_state_too_large, state(unknown, shares_state=True)) is None


def test_a_memory_that_nobody_knows_is_asked_for_only_where_it_matters() -> None:
    with pytest.raises(NotStated, match=r"state `device-memory-gib` in \[tool\.ddpdoctor\.job\]$"):
        found(model_state_too_large, state(JobMachine(may_use_gpus=True), 0.1))
    assert found(model_state_too_large, state(JobMachine(may_use_gpus=True), 0.01)) is None, "it fits every GPU"
    assert found(model_state_too_large, state(JobMachine(), 12)) is None, "it trains on no GPU"


def node(
    machine: JobMachine, workers: int = 0, threads: int = 1, *, chosen: bool = False, settings: tuple[Setting, ...] = ()
) -> RunRecord:
    """Two ranks with a training loader of so many workers, beside one for evaluation with many more."""
    job = JobBuilder(2, machine=machine)
    streams = training(job, workers=workers)
    streams["loaders"] += tuple(Loader(rank=rank, loader=1, workers=64) for rank in job.ranks)
    streams["passes"] += tuple(Pass(rank=rank, loader=1, ordinal=0, yielded=4) for rank in job.ranks)
    seen = tuple(CpuThreads(rank=rank, threads=threads, chosen=chosen) for rank in job.ranks)
    return job.record(cpu_threads=seen, settings=settings, **streams)


def test_more_than_two_threads_a_core_are_advice_with_the_sum() -> None:
    finding = found(cpu_oversubscription, node(H100, workers=16))
    assert finding is not None
    assert (finding.severity, finding.locations[0].line) == (Severity.ADVICE, LOADER_LINE)
    assert finding.title == "a node with 8 ranks runs 136 threads on 64 cores"
    assert finding.remedy == "Use fewer workers or threads per rank: there are 8 cores for each."
    assert finding.evidence[0].text == (
        "each rank has 1 thread for torch's computation and 16 workers of the training loader"
    )
    assert found(cpu_oversubscription, node(H100, workers=15)) is None, "two a core"


def test_threads_count_that_were_chosen_and_those_that_nobody_chose_on_a_cpu() -> None:
    assert found(cpu_oversubscription, node(H100, threads=17, chosen=True)) is not None
    spawned = JobMachine(cores=16, ranks_per_node=8, spreads_threads=True)
    finding = found(cpu_oversubscription, node(spawned))
    assert finding is not None
    assert finding.title == "a node with 8 ranks runs at least 64 threads on 16 cores"
    assert finding.evidence[0].text == (
        "each rank has at least 8 threads for torch's computation: OMP_NUM_THREADS is not set, as torchrun would"
    )
    assert finding.locations == ()
    assert found(cpu_oversubscription, node(spawned, chosen=True)) is None
    script = Setting(rank=0, name="OMP_NUM_THREADS", value="1")
    assert found(cpu_oversubscription, node(spawned, settings=(script,))) is None
    on_gpu = JobMachine(cores=16, ranks_per_node=8, spreads_threads=True, may_use_gpus=True)
    assert found(cpu_oversubscription, node(on_gpu)) is None


@pytest.mark.parametrize(
    ("machine", "keys"),
    [
        (JobMachine(), "`cores` and `ranks-per-node`"),
        (JobMachine(ranks_per_node=8), "`cores`"),
        (JobMachine(cores=8), "`ranks-per-node`"),
    ],
)
def test_nodes_that_nobody_knows_are_asked_for_only_where_it_matters(machine: JobMachine, keys: str) -> None:
    with pytest.raises(NotStated, match=rf"^the nodes of the job are not known: state {keys} in \[tool"):
        found(cpu_oversubscription, node(machine, workers=1))
    assert found(cpu_oversubscription, node(machine)) is None, "there is nothing to take away"
