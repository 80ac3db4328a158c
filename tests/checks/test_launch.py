"""How ranks are started, on records built by hand."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from ddpdoctor.checks.death import root_exception
from ddpdoctor.checks.launch import (
    backend_mismatch,
    cpu_tensor_with_nccl,
    fork_after_cuda,
    group_not_destroyed,
    hard_coded_rendezvous,
    missing_rank_environment,
    small_shared_memory,
    unsafe_environment,
)
from ddpdoctor.finding import Finding, Refuted, Severity
from ddpdoctor.record.streams.collectives import Wait
from ddpdoctor.record.streams.setup import ForkedUse, Setting
from tests.diagnosis.jobs import JobBuilder, healthy_job

INIT_LINE = 10


def joined(job: JobBuilder, **fields: Any) -> JobBuilder:
    """Let every rank call ``init_process_group``."""
    for rank in job.ranks:
        values = {"ended_ns": job.tick(), "direct": True, **fields}
        job.waits.append(
            Wait(rank=rank, kind="init_process_group", site=job.site(INIT_LINE), started_ns=job.tick(), **values)
        )
    return job


def finished(job: JobBuilder) -> JobBuilder:
    for rank in job.ranks:
        job.leave(rank, "finished", main_finished=True)
    return job


def said(check: ModuleType, job: JobBuilder, **streams: Any) -> list[Finding | Refuted]:
    return list(check.in_run(job.record(**streams)))


def setting(job: JobBuilder, rank: int, name: str, value: str, previous: str | None = None, **fields: Any) -> Setting:
    values = {"launched": True, **fields}
    return Setting(rank=rank, name=name, value=value, previous=previous, site=job.site(5), **values)


def test_a_port_over_the_launchers_is_a_warning_that_says_what_followed() -> None:
    job = joined(JobBuilder(2), ended_ns=0)
    found = tuple(setting(job, rank, "MASTER_PORT", "29500", "41234") for rank in job.ranks)
    (finding,) = said(hard_coded_rendezvous, job, settings=found)
    assert isinstance(finding, Finding)
    assert (finding.severity, [place.line for place in finding.locations]) == (Severity.WARNING, [5])
    assert finding.title == "MASTER_PORT is set to '29500' over the launcher's '41234'"
    assert finding.evidence[0].text == "init_process_group never returned: nothing listens there"


@pytest.mark.parametrize(("host", "misleads"), [("localhost", False), ("10.0.0.7", True)])
def test_another_name_of_this_machine_misleads_nobody(host: str, misleads: bool) -> None:
    job = joined(JobBuilder(2))
    found = tuple(setting(job, rank, "MASTER_ADDR", host, "127.0.0.1") for rank in job.ranks)
    assert bool(said(hard_coded_rendezvous, job, settings=found)) == misleads


@pytest.mark.parametrize(
    "fields",
    [
        {"previous": "29500"},
        {"previous": None},
        {"launched": False, "previous": "41234"},
        {"joined": True, "previous": "41234"},
    ],
    ids=["the same", "not set before", "no launcher", "too late to matter"],
)
def test_settings_that_mislead_nobody_are_left_alone(fields: dict[str, Any]) -> None:
    job = joined(JobBuilder(2))
    assert said(hard_coded_rendezvous, job, settings=(setting(job, 0, "MASTER_PORT", "29500", **fields),)) == []


def test_an_address_of_the_scripts_own_and_a_port_in_use_are_named() -> None:
    (own,) = said(hard_coded_rendezvous, joined(JobBuilder(2), meets_elsewhere="tcp://127.0.0.1:29500"))
    assert isinstance(own, Finding)
    assert own.title.startswith("the launcher's ranks have their rendezvous at tcp://127.0.0.1:29500")
    error = "DistNetworkError: failed to listen. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE"
    (taken,) = said(hard_coded_rendezvous, joined(JobBuilder(2), error=error))
    assert isinstance(taken, Finding)
    assert taken.title == "port 29500 is in use: the rendezvous fails"


NO_NCCL = {"backend": "nccl", "error": "RuntimeError: Distributed package doesn't have NCCL built in"}


@pytest.mark.parametrize(("taken", "named"), [((0, 1), "as each of ranks 0 and 1"), ((1,), "as rank 1")])
def test_ranks_that_join_under_the_numbers_of_others_are_one_finding(taken: tuple[int, ...], named: str) -> None:
    job = JobBuilder(2)
    for rank in taken:
        job.waits.append(Wait(rank=rank, kind="init_process_group", site=job.site(INIT_LINE), rank_taken=rank))
    (finding,) = said(hard_coded_rendezvous, job)
    assert isinstance(finding, Finding) and finding.ranks == taken
    assert finding.title == f"several ranks join the group {named}, whatever rank the launcher gave them"


def test_nccl_without_a_gpu_is_an_error_only_where_the_script_uses_none() -> None:
    (finding,) = said(backend_mismatch, joined(JobBuilder(2), **NO_NCCL))
    assert isinstance(finding, Finding) and finding.severity is Severity.ERROR
    (finding,) = said(backend_mismatch, joined(JobBuilder(2), mentions_cuda=True, **NO_NCCL))
    assert isinstance(finding, Finding) and finding.severity is Severity.ADVICE
    assert said(backend_mismatch, joined(joined(JobBuilder(2), **NO_NCCL), backend="gloo")) == [], "it fell back"
    hidden = JobBuilder(2, environment={"CUDA_VISIBLE_DEVICES": ""})
    assert said(backend_mismatch, joined(hidden, **NO_NCCL)) == [], "the doctor hid the GPUs"


def test_a_group_that_is_left_is_advice_and_one_that_is_destroyed_refutes_it() -> None:
    (finding,) = said(group_not_destroyed, finished(joined(JobBuilder(2))))
    assert isinstance(finding, Finding)
    assert (finding.severity, finding.ranks) == (Severity.ADVICE, (0, 1))
    job = joined(JobBuilder(2))
    job.waits += [Wait(rank=rank, kind="destroy_process_group", ended_ns=1) for rank in job.ranks]
    (refuted,) = said(group_not_destroyed, finished(job))
    assert isinstance(refuted, Refuted)
    assert said(group_not_destroyed, finished(joined(JobBuilder(2), direct=False))) == [], "a library made it"
    job = joined(JobBuilder(2))
    for rank in job.ranks:
        job.leave(rank, "ended-by-rehearsal")
    assert said(group_not_destroyed, job) == []


def test_a_variable_that_is_not_set_is_named() -> None:
    error = "ValueError: Error initializing: environment variable RANK expected, but not set"
    (finding,) = said(missing_rank_environment, joined(JobBuilder(2), error=error))
    assert isinstance(finding, Finding)
    assert finding.title == "init_process_group fails: RANK is not set in the ranks' environment"
    (refuted,) = said(missing_rank_environment, joined(JobBuilder(2)))
    assert isinstance(refuted, Refuted)


def test_a_collective_in_a_forked_process_is_a_warning() -> None:
    job = JobBuilder(2)
    uses = tuple(ForkedUse(rank=rank, kind="all_reduce", site=job.site(33)) for rank in job.ranks)
    (finding,) = said(fork_after_cuda, job, forked_uses=uses)
    assert isinstance(finding, Finding)
    assert (finding.ranks, [place.line for place in finding.locations]) == ((0, 1), [33])


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (fork_after_cuda, "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, ..."),
        (cpu_tensor_with_nccl, "No backend type associated with device type cpu"),
        (small_shared_memory, "DataLoader worker (pid 7) is killed by signal: Bus error."),
        (hard_coded_rendezvous, "The server socket has failed to listen. port: 29500, name: EADDRINUSE"),
    ],
)
def test_an_exception_that_names_its_cause_is_that_checks_and_nobody_elses(check: ModuleType, message: str) -> None:
    job = healthy_job(2)
    job.job["backend"] = "cpu:gloo,cuda:nccl"
    job.call(0, "barrier", 70)
    job.wait_in_last(0)
    job.fail(1, "RuntimeError", 66, message)
    (finding,) = said(check, job)
    assert isinstance(finding, Finding)
    assert (finding.ranks, [place.line for place in finding.locations]) == ((1,), [66])
    assert said(root_exception, job) == []


def variables(backend: str, environment: dict[str, str], **job: Any) -> list[str]:
    found = said(unsafe_environment, JobBuilder(2, backend, environment=environment, **job))
    return [finding.title.partition("=")[0] for finding in found if isinstance(finding, Finding)]


def test_variables_that_harm_are_named_and_others_left_alone() -> None:
    detail = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    assert variables("gloo", detail, torch_version="2.13.0+cpu") == ["TORCH_DISTRIBUTED_DEBUG"]
    assert variables("gloo", detail, torch_version="2.12.0") == []
    assert variables("nccl", detail, torch_version="2.13.0") == []
    harmful = {
        "TORCH_NCCL_ENABLE_TIMING": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "NCCL_P2P_DISABLE": "1",
        "CUDA_LAUNCH_BLOCKING": "0",
    }
    assert variables("nccl", harmful) == [
        "TORCH_NCCL_ENABLE_TIMING",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_P2P_DISABLE",
    ]
    assert variables("gloo", harmful) == []
    assert variables("nccl", {"TORCH_NCCL_BLOCKING_WAIT": "1"}) == ["TORCH_NCCL_BLOCKING_WAIT"]
    assert variables("nccl", {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}) == [
        "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    ]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [("ib0", True), ("eth", False), ("=eth", True), ("=eth0", False), ("^ib0", False), ("eth,ib0", False), ("", False)],
)
def test_interfaces_that_this_machine_does_not_have(wanted: str, found: bool) -> None:
    environment = {"NCCL_SOCKET_IFNAME": wanted}
    assert bool(variables("nccl", environment, interfaces=("lo", "eth0"))) is found
    assert variables("nccl", environment) == [], "the interfaces are not known"


def test_a_variable_that_the_script_sets_has_its_line() -> None:
    job = JobBuilder(2, "nccl")
    found = said(unsafe_environment, job, settings=(setting(job, 0, "NCCL_P2P_DISABLE", "1"),))
    assert [place.line for result in found if isinstance(result, Finding) for place in result.locations] == [5]


def test_a_variable_that_came_too_late_or_was_removed_again_does_no_harm() -> None:
    job = JobBuilder(2, torch_version="2.13.0")
    set_late = setting(job, 0, "TORCH_DISTRIBUTED_DEBUG", "DETAIL", imported=True)
    assert said(unsafe_environment, job, settings=(set_late,)) == []
    set_early = setting(job, 0, "TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    (finding,) = said(unsafe_environment, job, settings=(set_early,))
    assert isinstance(finding, Finding)
    job = JobBuilder(2, "nccl", environment={"NCCL_P2P_DISABLE": "1"})
    assert said(unsafe_environment, job, settings=(setting(job, 0, "NCCL_P2P_DISABLE", "", removed=True),)) == []
