"""GPUs and checkpoints, on records built by hand."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from ddpdoctor.checks.launch import (
    collective_before_set_device,
    fork_after_cuda,
    missing_set_device,
)
from ddpdoctor.checks.state import load_without_map_location, module_prefix
from ddpdoctor.finding import Finding, Refuted, Severity
from ddpdoctor.record.streams.collectives import Wait
from ddpdoctor.record.streams.setup import CheckpointLoad, DeviceChoice, DeviceUse, StateNames
from ddpdoctor.record.streams.training import FileEvent
from tests.diagnosis.jobs import JobBuilder


def said(check: ModuleType, job: JobBuilder, **streams: Any) -> list[Finding | Refuted]:
    return list(check.in_run(job.record(**streams)))


def local_ranks(job: JobBuilder, *numbers: int) -> JobBuilder:
    """Put the ranks on nodes: a local rank 0 begins a new one."""
    node = -1
    for rank, local_rank in zip(job.ranks, numbers, strict=True):
        node += local_rank == 0
        job.of_rank[rank].update(local_rank=local_rank, node=node)
    return job


def use(job: JobBuilder, rank: int, index: int, how: Any = "current", line: int = 25, **fields: Any) -> DeviceUse:
    return DeviceUse(rank=rank, index=index, how=how, site=job.site(line), **fields)


def test_ranks_of_one_node_on_one_gpu_are_a_warning() -> None:
    job = local_ranks(JobBuilder(2), 0, 1)
    (finding,) = said(missing_set_device, job, device_uses=tuple(use(job, rank, 0) for rank in job.ranks))
    assert isinstance(finding, Finding)
    assert (finding.severity, finding.ranks) == (Severity.WARNING, (0, 1))
    assert finding.title == "ranks 0 and 1 of one node all use GPU 0: no process selects its own"


def test_a_gpu_for_each_rank_refutes_it_and_other_layouts_say_nothing() -> None:
    job = local_ranks(JobBuilder(2), 0, 1)
    own = tuple(use(job, rank, rank, was_set=True) for rank in job.ranks)
    (refuted,) = said(missing_set_device, job, device_uses=own)
    assert isinstance(refuted, Refuted)
    both = tuple(use(job, rank, 0) for rank in job.ranks)
    named = tuple(use(job, rank, rank, "explicit") for rank in job.ranks)
    assert said(missing_set_device, job, device_uses=both[:1]) == [], "one rank uses none"
    assert said(missing_set_device, job, device_uses=(*both, *named)) == [], "the rest is moved by name"
    assert said(missing_set_device, local_ranks(JobBuilder(2), 0, 0), device_uses=both) == [], "two nodes"
    job.job["environment"] = {"CUDA_VISIBLE_DEVICES": "3"}
    assert said(missing_set_device, job, device_uses=both) == [], "each process sees one GPU"


def choices(job: JobBuilder, *chosen: bool, **fields: Any) -> list[Finding | Refuted]:
    values = {"backend": "nccl", "ended_ns": 1, **fields}
    job.waits = [Wait(rank=rank, kind="init_process_group", **values) for rank in job.ranks]
    found = tuple(
        DeviceChoice(rank=rank, chosen=choice, site=job.site(30 + choice)) for choice in chosen for rank in job.ranks
    )
    return said(collective_before_set_device, job, device_choices=found)


def test_a_barrier_before_the_choice_of_a_gpu_is_advice() -> None:
    (finding,) = choices(JobBuilder(2), False, True)
    assert isinstance(finding, Finding)
    assert (finding.severity, [place.line for place in finding.locations]) == (Severity.ADVICE, [30])
    assert choices(JobBuilder(2), True) == []
    assert choices(JobBuilder(2), False) == [], "it never chooses one"
    assert choices(JobBuilder(2), False, True, backend="gloo") == []
    assert choices(JobBuilder(2), False, True, named_device=True) == []


def test_cuda_in_a_forked_process_is_a_warning() -> None:
    job = JobBuilder(2)
    (finding,) = said(fork_after_cuda, job, device_uses=tuple(use(job, rank, 0, forked=True) for rank in job.ranks))
    assert isinstance(finding, Finding)
    assert finding.title == "a forked process of ranks 0 and 1 uses CUDA, which its parent has initialised"
    assert said(fork_after_cuda, job, device_uses=(use(job, 0, 0),)) == []


def load(job: JobBuilder, rank: int, **fields: Any) -> CheckpointLoad:
    values = {"path": "/job/old.pt", "saved_on": ("cuda:0",), **fields}
    return CheckpointLoad(rank=rank, site=job.site(44), **values)


def test_a_checkpoint_of_one_gpu_that_all_ranks_load_is_a_warning() -> None:
    job = JobBuilder(2)
    (finding,) = said(load_without_map_location, job, checkpoint_loads=tuple(load(job, rank) for rank in job.ranks))
    assert isinstance(finding, Finding)
    assert finding.title == "ranks 0 and 1 load old.pt onto the GPU from which it was saved"
    job.fail(1, "RuntimeError", 45, "Attempting to deserialize object on a CUDA device but ... is False.")
    (finding,) = said(load_without_map_location, job)
    assert isinstance(finding, Finding) and finding.ranks == (1,)


@pytest.mark.parametrize(
    ("fields", "saves", "refuted"),
    [
        ({"mapped": True, "saved_on": ()}, False, True),
        ({"saved_on": ("cpu",)}, False, True),
        ({"saved_on": ("cpu",)}, True, False),
        ({"saved_on": ()}, False, False),
    ],
    ids=["mapped", "of the CPU", "of the CPU, saved by this rehearsal", "unknown"],
)
def test_loads_that_are_no_fault(fields: dict[str, Any], saves: bool, refuted: bool) -> None:
    job = JobBuilder(2)
    files = (FileEvent(rank=0, action="save", path="/job/old.pt", time_ns=1),) if saves else ()
    loads = tuple(load(job, rank, **fields) for rank in job.ranks)
    results = said(load_without_map_location, job, checkpoint_loads=loads, files=files)
    assert [type(result) for result in results] == ([Refuted] if refuted else [])


def names(job: JobBuilder, rank: int, **fields: Any) -> StateNames:
    values = {"module_class": "Net", "names": 6, "site": job.site(48), "time_ns": job.tick(), **fields}
    return StateNames(rank=rank, **values)


def test_names_that_differ_by_the_prefix_are_advice() -> None:
    job = JobBuilder(2)
    (finding,) = said(module_prefix, job, state_names=tuple(names(job, rank, too_long=6) for rank in job.ranks))
    assert isinstance(finding, Finding)
    assert finding.severity is Severity.ADVICE
    assert finding.title == (
        'a bare model (Net) loads what was saved from the DDP wrapper: the names differ by the prefix "module.", '
        "and strict=False skips 6 of 6 names"
    )


def test_names_that_fit_or_were_put_right_are_no_fault() -> None:
    job = JobBuilder(2)
    (refuted,) = said(module_prefix, job, state_names=(names(job, 0, names=0),))
    assert isinstance(refuted, Refuted)
    assert said(module_prefix, job, state_names=(names(job, 0, too_long=6, raised=True),)) == [], "it was caught"
    again = (names(job, 0, too_long=6), names(job, 0, names=0, site=job.site(49)))
    assert not [result for result in said(module_prefix, job, state_names=again) if isinstance(result, Finding)]
    assert said(module_prefix, job, state_names=(names(job, 0),)) == [], "another model altogether"
    job.fail(0, "RuntimeError", 48)
    (finding,) = said(module_prefix, job, state_names=(names(job, 0, too_short=6, raised=True),))
    assert isinstance(finding, Finding) and finding.title.endswith("and the load fails")
