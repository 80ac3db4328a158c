"""Gradients that DDP did not average: the reason decides which check speaks, and equal gradients silence all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from ddpdoctor.checks.gradients import (
    autograd_grad_bypass,
    diverged_replicas,
    forward_bypasses_ddp,
    misplaced_no_sync,
    missing_ddp_wrap,
    module_changed_after_wrap,
    parameter_ready_twice,
    rank_zero_load,
    unused_parameters,
)
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.record.model import RunRecord, TensorInfo
from ddpdoctor.record.streams.training import (
    GradientsTaken,
    MissingGradient,
    OwnWrite,
    TrainingState,
    WrapChange,
    WrittenAverages,
)
from tests.checks.replicas import BACKWARD_LINE, NAMES, STEP_LINE, WRAP_LINE, Replicas
from tests.diagnosis.jobs import SCRIPT

CHECKS = (
    autograd_grad_bypass,
    diverged_replicas,
    forward_bypasses_ddp,
    misplaced_no_sync,
    missing_ddp_wrap,
    module_changed_after_wrap,
    parameter_ready_twice,
    rank_zero_load,
    unused_parameters,
)


def said(record: RunRecord) -> list[Finding]:
    return [found for check in CHECKS for found in check.in_run(record) if isinstance(found, Finding)]


def codes(record: RunRecord) -> list[str]:
    return [finding.code for finding in said(record)]


def trained(why: str = "", *, forward: bool = True, synchronised: bool = True, differ: bool = True) -> Replicas:
    """Two steps whose gradients differ, and with them the parameters."""
    job = Replicas()
    job.digests("parameter_digests", 0)
    for _ in range(2):
        if forward:
            job.forward(synchronised=synchronised)
        job.backward(why)
        job.optimizer_step(NAMES if differ else (), NAMES if differ else ())
    return job


def test_a_forward_past_the_wrapper_is_an_error_with_its_numbers() -> None:
    (finding,) = said(trained("bypass", forward=False).seen())
    assert (finding.code, finding.severity) == ("DDP207", Severity.ERROR)
    assert [place.line for place in finding.locations] == [BACKWARD_LINE]
    assert finding.title.endswith("the gradients of Net are not averaged, and differ between ranks in 2 of 2 steps")
    assert finding.evidence[0].numbers["parameters"] == 2
    assert [fact.location and fact.location.line for fact in finding.evidence[1:]] == [STEP_LINE, WRAP_LINE]


@pytest.mark.parametrize("why", ["bypass", "again", "no-sync"])
def test_equal_gradients_silence_every_suspicion(why: str) -> None:
    assert said(trained(why, differ=False).seen()) == []


def test_gradients_that_come_twice_in_one_backward_are_those_of_shared_checkpoints() -> None:
    (finding,) = said(trained("twice").seen())
    assert (finding.code, finding.severity, finding.locations[0].line) == ("DDP210", Severity.ERROR, BACKWARD_LINE)
    assert "use_reentrant=False" in finding.remedy


def test_a_further_backward_and_returned_gradients_are_one_defect() -> None:
    assert codes(trained("again").seen()) == ["DDP220"]
    job = Replicas()
    taken = [GradientsTaken(rank=rank, wraps=(0,), site=job.site(55), time_ns=job.tick()) for rank in job.ranks]
    job.optimizer_step(NAMES, NAMES)
    (finding,) = said(job.seen(gradients_taken=tuple(taken)))
    assert (finding.code, finding.locations[0].line) == ("DDP220", 55)


def test_no_sync_in_every_forward_is_told_from_no_sync_in_the_last() -> None:
    (never,) = said(trained("no-sync", synchronised=False).seen())
    assert never.code == "DDP217" and never.title.startswith("synchronisation is off in every training forward")
    job = Replicas()
    job.forward()
    job.backward()
    job.forward(synchronised=False)
    job.backward("no-sync")
    job.optimizer_step(NAMES, NAMES)
    (last,) = said(job.seen())
    assert last.code == "DDP217" and "in the micro-step after which the optimizer steps" in last.title


def test_what_came_before_the_last_reduction_was_averaged_with_it() -> None:
    job = Replicas()
    job.forward(synchronised=False)
    job.backward("no-sync")
    job.forward()
    job.backward()
    job.optimizer_step(NAMES, NAMES)
    assert codes(job.seen()) == ["DDP208"]


def test_a_step_that_our_cut_brought_about_is_no_evidence() -> None:
    job = Replicas()
    job.forward(synchronised=False)
    job.backward("no-sync")
    job.pass_ends("cut", 64, 1_000)
    job.optimizer_step(NAMES, NAMES)
    assert said(job.seen()) == []


def test_models_that_are_averaged_by_hand_at_intervals_may_differ_meanwhile() -> None:
    job = Replicas()
    for step in range(3):
        job.forward(synchronised=False)
        job.backward("no-sync")
        job.optimizer_step(NAMES, NAMES)
        if step == 1:
            job.call(job.ranks, "all_reduce", 70, 1_000)
    assert said(job.seen()) == []


def test_parameters_that_ddp_did_not_list_are_another_defect() -> None:
    job = trained("")
    job.rows["gradient_digests"].clear()
    for step in (1, 2):
        job.digests("gradient_digests", step, ["head.weight"])
    changes = tuple(WrapChange(rank=rank, wrap=0, added=("head.weight",)) for rank in job.ranks)
    (finding,) = said(job.seen(wrap_changes=changes, parameter_digests=()))
    assert (finding.code, finding.locations[0].line) == ("DDP213", WRAP_LINE)
    assert finding.title.endswith("(added or unfrozen after the wrap): head.weight")


def test_frozen_parameters_that_ddp_waits_for_are_not_reported_as_unused() -> None:
    job = trained("")
    missing = tuple(MissingGradient(rank=rank, wrap=0, parameters=("body.weight",)) for rank in job.ranks)
    assert codes(job.seen(missing_gradients=missing)) == ["DDP201"]
    changes = tuple(WrapChange(rank=rank, wrap=0, frozen=("body.weight",)) for rank in job.ranks)
    assert codes(job.seen(missing_gradients=missing, wrap_changes=changes)) == ["DDP213"]


def test_replicas_that_differ_before_the_first_step_were_changed_after_the_wrap() -> None:
    job = Replicas()
    job.digests("parameter_digests", 0, ["head.weight"])
    job.forward()
    job.backward()
    job.optimizer_step((), NAMES)
    (finding,) = said(job.seen())
    assert (finding.code, finding.locations[0].line) == ("DDP208", WRAP_LINE)
    assert finding.title == (
        "the parameters of Net differ between ranks 0 and 1 before the first optimizer step, head.weight first"
    )


@pytest.mark.parametrize(
    ("gradients", "rates", "remedy"),
    [
        ((), (0.1, 0.2), "Give the optimizer the same learning rate on every rank."),
        (NAMES, (0.1, 0.1), "Change gradients after backward (clipping, noise, skipped values)"),
        ((), (0.1, 0.1), "Look for code that sets parameters or optimizer state on some ranks only."),
    ],
)
def test_the_remedy_of_diverged_replicas_follows_the_cause(
    gradients: Any, rates: tuple[float, ...], remedy: str
) -> None:
    job = Replicas()
    job.forward()
    job.backward()
    job.optimizer_step(gradients, NAMES, rates=rates)
    (finding,) = said(job.seen())
    assert finding.code == "DDP208" and finding.remedy.startswith(remedy)
    assert "after step 1 of the optimizer" in finding.title


def test_what_a_module_changes_itself_is_a_warning_of_its_own() -> None:
    job = Replicas()
    job.forward()
    job.backward()
    job.optimizer_step((), NAMES[:1])
    frozen = TensorInfo(name=NAMES[0], shape=(500,), dtype="float32", size_bytes=2_000, requires_grad=False)
    record = job.seen()
    wraps = tuple(msgspec.structs.replace(one, parameters=(frozen, *one.parameters[1:])) for one in record.wraps)
    (finding,) = said(job.seen(wraps=wraps))
    assert (finding.code, finding.severity) == ("DDP208", Severity.WARNING)
    assert finding.remedy.startswith("Average over the ranks what it is changed by")


@pytest.mark.parametrize(
    ("function", "remedy"), [("forward", "Average the gradients before this step"), ("train", "Change")]
)
def test_a_step_that_a_module_makes_in_its_forward_is_told_as_such(function: str, remedy: str) -> None:
    job = Replicas()
    job.forward()
    job.backward()
    job.optimizer_step(NAMES, NAMES)
    site = job.site(STEP_LINE, 9, function=function)
    record = job.seen()
    steps = tuple(msgspec.structs.replace(step, site=site) for step in record.optimizer_steps)
    (finding,) = said(job.seen(optimizer_steps=steps))
    assert finding.code == "DDP208" and finding.remedy.startswith(remedy)


def ignored(job: Replicas) -> dict[str, Any]:
    return {"wraps": tuple(job.wrapped(rank, ignored=NAMES) for rank in job.ranks)}


def hooked(job: Replicas) -> dict[str, Any]:
    return {"wraps": tuple(job.wrapped(rank, communication_hook=True) for rank in job.ranks)}


def groups_of_one(job: Replicas) -> dict[str, Any]:
    return {"wraps": tuple(job.wrapped(rank, ranks=(rank,)) for rank in job.ranks)}


def mismatch(job: Replicas) -> dict[str, Any]:
    job.call(0, "all_reduce", 70, 3)
    job.call(1, "all_reduce", 70, 4)
    return {}


@pytest.mark.parametrize("change", [ignored, hooked, groups_of_one, mismatch])
def test_replicas_that_need_not_agree_are_left_alone(change: Callable[[Replicas], dict[str, Any]]) -> None:
    job = trained("")
    assert codes(job.seen()) == ["DDP208"]
    assert said(job.seen(**change(job))) == []


def states(job: Replicas, digests: tuple[str, str], loaded: tuple[int, ...]) -> dict[str, Any]:
    site = job.site(80)
    return {
        "training_states": tuple(
            TrainingState(
                rank=rank,
                kind="optimizer",
                number=0,
                type="Adam",
                digest=digests[rank],
                loads=(site,) if rank in loaded else (),
                wraps=(0,),
            )
            for rank in job.ranks
        )
    }


def test_state_that_one_rank_loaded_explains_the_replicas_that_part() -> None:
    job = Replicas()
    job.forward()
    job.backward()
    job.optimizer_step((), NAMES)
    (finding,) = said(job.seen(**states(job, ("loaded", "fresh"), (0,))))
    assert (finding.code, finding.ranks, finding.locations[0].line) == ("DDP221", (0,), 80)


@pytest.mark.parametrize("parts", [True, False])
def test_state_that_one_rank_loads_after_the_first_step_is_judged_by_the_parameters(parts: bool) -> None:
    job = Replicas()
    for parameters in ((), (), NAMES if parts else ()):
        job.forward()
        job.backward()
        job.optimizer_step((), parameters)
    (state, other) = states(job, ("same", "same"), ())["training_states"]
    late = msgspec.structs.replace(state, late_loads=(job.site(80),))
    record = job.seen(training_states=(late, other))
    assert codes(record) == (["DDP221"] if parts else [])
    assert [entry for entry in rank_zero_load.in_run(record) if not isinstance(entry, Finding)] == []


@pytest.mark.parametrize(("digests", "loaded"), [(("same", "same"), (0,)), (("zero's", "one's"), (0, 1))])
def test_state_that_all_hold_or_all_loaded_refutes_it(digests: tuple[str, str], loaded: tuple[int, ...]) -> None:
    job = Replicas()
    (refuted,) = rank_zero_load.in_run(job.seen(**states(job, digests, loaded)))
    assert not isinstance(refuted, Finding) and refuted.location.line == 80


def test_what_a_module_changes_itself_is_told_with_the_line_that_does() -> None:
    job = Replicas()
    job.digests("parameter_digests", 0)
    for _ in range(2):
        job.forward()
        job.backward()
        job.optimizer_step((), NAMES[:1])
    frozen = [TensorInfo(name=name, shape=(500,), dtype="float32", size_bytes=2_000) for name in NAMES]
    wraps = tuple(job.wrapped(rank, parameters=tuple(frozen)) for rank in job.ranks)
    lines = ((NAMES[0], 33), (NAMES[1], 34), (NAMES[0], 33))
    writes = tuple(
        OwnWrite(rank=rank, wrap=0, name=name, site=job.site(at)) for rank in job.ranks for name, at in lines
    )
    (finding,) = said(job.seen(wraps=wraps, own_writes=writes))
    assert (finding.code, finding.severity) == ("DDP208", Severity.WARNING)
    told = [(fact.text, fact.location.line) for fact in finding.evidence if fact.location and "changed" in fact.text]
    assert told == [(f"{NAMES[0]} is changed here", 33)]


def unwrapped(shards: bool = True) -> Replicas:
    job = Replicas(wrapped=False)
    job.loader(sampler_shards=shards)
    job.digests("parameter_digests", 0)
    for _ in range(3):
        job.backward()
        job.optimizer_step(NAMES, NAMES)
    job.pass_ends("exhausted", 3, 3)
    return job


def test_a_job_without_a_wrap_trains_independent_models() -> None:
    (finding,) = said(unwrapped().seen())
    assert (finding.code, finding.severity, finding.locations[0].line) == ("DDP214", Severity.ERROR, BACKWARD_LINE)
    assert "the model is not wrapped in DistributedDataParallel" in finding.title


def test_parameters_beside_a_wrap_are_told_by_the_backward_that_reaches_both() -> None:
    job = unwrapped()
    rows = job.rows["backwards"]
    streams = {
        "wraps": tuple(job.wrapped(rank) for rank in job.ranks),
        "backwards": tuple(msgspec.structs.replace(row, wraps=(0,)) for row in rows),
    }
    (finding,) = said(job.seen(**streams))
    assert (finding.code, finding.locations[0].line) == ("DDP214", BACKWARD_LINE)
    assert "in no module that DistributedDataParallel wraps" in finding.title
    assert all(name in finding.evidence[0].text for name in NAMES)


def test_a_call_that_could_average_and_was_not_reached_leaves_it_open() -> None:
    job = unwrapped()
    job.call(job.ranks, "all_reduce", 70)
    local = trained("no-sync", synchronised=False)
    for line, known in ((70, True), (71, False)):
        written = {"written_averages": (WrittenAverages(rank=0, places=((SCRIPT, line),)),)}
        assert codes(job.seen(**written)) == (["DDP214"] if known else [])
        assert not known or codes(local.seen()) == ["DDP217"]
        assert known or said(local.seen(**written)) == []


def test_without_shards_or_with_traffic_as_large_as_the_model_nothing_is_said() -> None:
    assert said(unwrapped(shards=False).seen()) == []
    averaged = unwrapped()
    averaged.optimizer_step(NAMES, NAMES)
    averaged.call(averaged.ranks, "reduce_scatter_tensor", 70, 900)
    assert said(averaged.seen()) == []
    equal = unwrapped()
    equal.optimizer_step((), ())
    assert said(equal.seen()) == []


@pytest.mark.parametrize("elements", [1_000, 400])
def test_a_model_made_anew_in_the_place_of_a_wrapped_one_is_meant_to_be_one_model(elements: int) -> None:
    job = Replicas()
    job.loader()
    job.forward()
    job.backward()
    job.optimizer_step()
    job.wrap = -1
    for _ in range(2):
        job.backward()
        job.optimizer_step(NAMES, NAMES)
    job.pass_ends("exhausted", 3, 3)
    rows = job.rows["optimizer_steps"]
    job.rows["optimizer_steps"] = [
        msgspec.structs.replace(step, optimizer=1, ordinal=step.ordinal - 1, elements=elements)
        if step.wraps == (-1,)
        else step
        for step in rows
    ]
    for stream in ("gradient_digests", "parameter_digests"):
        job.rows[stream] = [
            msgspec.structs.replace(entry, optimizer=1, step=entry.step - 1) if entry.wrap == -1 else entry
            for entry in job.rows[stream]
        ]
    assert codes(job.seen()) == (["DDP214"] if elements == 1_000 else [])


def test_parameters_beside_a_wrap_that_began_different_are_meant_to_differ() -> None:
    job = unwrapped()
    beside = {"wraps": tuple(job.wrapped(rank) for rank in job.ranks)}
    assert codes(job.seen(**beside)) == ["DDP214"]
    began = tuple(
        msgspec.structs.replace(entry, digests=dict.fromkeys(NAMES, f"{entry.rank}")) if not entry.step else entry
        for entry in job.rows["parameter_digests"]
    )
    assert said(job.seen(**beside, parameter_digests=began)) == []
