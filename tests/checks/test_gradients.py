from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ddpdoctor.checks.gradients import unused_parameters, wasted_broadcast_buffers
from ddpdoctor.diagnosis.divergence.unused_parameters import folded
from ddpdoctor.finding import Finding, Refuted, Severity
from ddpdoctor.record.model import Forward, TensorInfo
from ddpdoctor.record.streams.collectives import CutGraph
from ddpdoctor.record.streams.training import Backward, BufferState, MissingGradient
from tests.checks.training import WRAP_LINE, forward, training
from tests.diagnosis.jobs import JobBuilder


def unused(job: JobBuilder, by_rank: dict[int, tuple[str, ...]], **options: bool) -> list[Finding | Refuted]:
    streams = training(job)
    streams["wraps"] = tuple(
        msgspec.structs.replace(wrap, options={**wrap.options, **options}) for wrap in streams["wraps"]
    )
    streams["missing_gradients"] = tuple(
        MissingGradient(rank=rank, wrap=0, site=job.site(50), parameters=names) for rank, names in by_rank.items()
    )
    return list(unused_parameters.in_run(job.record(**streams)))


def test_parameters_without_gradient_are_named_with_their_size() -> None:
    (finding,) = unused(JobBuilder(2), {0: ("head.weight",), 1: ("head.weight",)})
    assert isinstance(finding, Finding)
    assert finding.title == "1 of 13 parameters of Net got no gradient (50 elements, 200 bytes): head.weight"
    assert [location.line for location in finding.locations] == [WRAP_LINE, 50]
    assert (finding.severity, finding.ranks) == (Severity.ERROR, (0, 1))
    assert finding.evidence[0].numbers == {"parameters": 1, "elements": 50, "bytes": 200}


def test_ranks_that_use_different_parameters_will_hang() -> None:
    (finding,) = unused(JobBuilder(2), {1: ("head.weight",)})
    assert isinstance(finding, Finding)
    assert finding.title == (
        "on rank 1 1 of 13 parameters of Net got no gradient (50 elements, 200 bytes): head.weight; "
        "all have one on rank 0, so the job hangs or fails in the next step"
    )
    assert "find_unused_parameters=True" in finding.remedy


def test_ranks_that_lack_different_parameters_are_told_apart_by_what_they_lack_alone() -> None:
    (finding,) = unused(JobBuilder(2), {0: ("head.weight", "head.bias"), 1: ("head.bias",)})
    assert isinstance(finding, Finding)
    assert finding.title == (
        "on rank 0 2 of 13 parameters of Net got no gradient (50 elements, 200 bytes): head.bias, head.weight; "
        "of these, other ranks have one for head.weight, so the job hangs or fails in the next step"
    )
    assert finding.evidence[0].text.endswith("; of these, other ranks have one for head.weight")
    assert "of these" not in finding.evidence[1].text


def never(
    names: tuple[str, ...], *leaves: tuple[int, ...], steps: int = 4, gathers: int = 1
) -> list[Finding | Refuted]:
    """A search in whose every step these parameters lack a gradient, and a gather of what has these leaves."""
    job = JobBuilder(2)
    streams = training(job)
    options = {**streams["wraps"][0].options, "find_unused_parameters": True}
    streams["wraps"] = tuple(msgspec.structs.replace(wrap, options=options) for wrap in streams["wraps"])
    streams["backwards"] = tuple(Backward(rank=rank, synchronised=(0,)) for rank in job.ranks for step in range(steps))
    streams["missing_gradients"] = tuple(
        MissingGradient(rank=rank, wrap=0, site=job.site(50), parameters=names)
        for rank in job.ranks
        for step in range(steps)
    )
    streams["cut_graphs"] = tuple(
        CutGraph(rank=rank, site=job.site(44), kind="all_gather", leaves=leaves)
        for rank in job.ranks
        for _ in range(gathers if leaves else 0)
    )
    return list(unused_parameters.in_run(job.record(**streams)))


LAYERS = tuple(f"layers.{layer}.{part}" for layer in range(6) for part in ("weight", "bias"))


def test_parameters_that_never_learn_behind_a_gather_are_an_error_at_the_gather() -> None:
    (finding,) = never(LAYERS, *[(10, 10)] * 12, (5, 10))
    assert isinstance(finding, Finding)
    assert (finding.severity, finding.locations[0].line) == (Severity.ERROR, 44)
    assert "all_gather at train.py:44 ends the graph" in finding.title
    assert "nn.functional.all_gather" in finding.remedy and "find_unused_parameters" not in finding.remedy


def test_two_gathers_that_each_end_the_graph_of_a_part_end_it_together() -> None:
    (finding,) = never(LAYERS, *[(10, 10)] * 6, gathers=2)
    assert isinstance(finding, Finding)
    assert (finding.severity, finding.locations[0].line) == (Severity.ERROR, 44)
    (one,) = never(LAYERS, *[(10, 10)] * 6)
    assert isinstance(one, Finding)
    assert one.locations[0].line == WRAP_LINE


def test_parameters_that_never_learn_for_another_reason_are_no_fault_of_a_gather() -> None:
    (finding,) = never(LAYERS, (5, 10))
    assert isinstance(finding, Finding)
    assert (finding.severity, finding.locations[0].line) == (Severity.WARNING, WRAP_LINE)
    assert "in none of 4 steps" in finding.title and "detach" in finding.remedy
    (head,) = never(("head.weight",))
    assert isinstance(head, Finding)
    assert head.severity is Severity.ADVICE
    assert never(LAYERS, steps=3) == []


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_options_that_serve_unused_parameters_silence_it(option: str) -> None:
    assert unused(JobBuilder(2), {0: ("head.weight",)}, **{option: True}) == []


def test_gradients_for_all_parameters_say_nothing() -> None:
    assert unused(JobBuilder(2), {}) == []


def test_many_names_are_folded_by_their_modules() -> None:
    few = ("a.weight", "b.weight")
    assert folded(few) == few
    assert folded([f"encoder.layers.3.part{part}.weight" for part in range(12)]) == (
        "encoder.layers.3.* (12 parameters)",
    )
    many = [f"layers.{layer}.{part}" for layer in range(9) for part in ("weight", "bias")]
    assert folded([*many, "head.weight"]) == ("head.weight", "layers.* (18 parameters)")
    assert folded([f"p{number}" for number in range(9)])[-1] == "4 more"


Digests = dict[int, list[dict[str, str]]]


def buffers(
    job: JobBuilder,
    sizes: dict[str, int],
    digests: Digests,
    *,
    equal_inputs: bool = False,
    by_user: bool = True,
    forwards: tuple[Forward, ...] = (),
    **options: Any,
) -> list[Finding | Refuted]:
    streams = training(job)
    streams["wraps"] = tuple(
        msgspec.structs.replace(
            wrap,
            by_user=by_user,
            options={**wrap.options, **options},
            buffers=tuple(
                TensorInfo(
                    name=name,
                    shape=() if "batches" in name else (size,),
                    dtype="int64" if "batches" in name else "float32",
                    size_bytes=size,
                )
                for name, size in sizes.items()
            ),
        )
        for wrap in streams["wraps"]
    )
    streams["buffers"] = tuple(
        BufferState(rank=rank, wrap=0, forward=number, digests=values)
        for rank, states in digests.items()
        for number, values in enumerate(states)
    )
    if forwards:
        streams["forwards"] = forwards
    if equal_inputs:
        streams["forwards"] = tuple(forward(rank, step, f"step {step}") for step in range(4) for rank in job.ranks)
    job.step(job.ranks, 2)
    job.call(job.ranks, "broadcast", 40, 64, origin="ddp-forward", root=0)
    return list(wasted_broadcast_buffers.in_run(job.record(**streams)))


CONSTANT: Digests = {rank: [{"mask": "m"}] * 2 for rank in (0, 1)}
BATCH_NORM: Digests = {
    rank: [{"mean": f"{rank if step else 'start'} {step}", "batches": str(step), "mask": "m"} for step in range(3)]
    for rank in (0, 1)
}


def test_a_large_constant_buffer_is_a_warning_with_bytes_and_broadcasts() -> None:
    (finding,) = buffers(JobBuilder(2, torch_version="2.13.0+cpu"), {"mask": 4_194_304}, CONSTANT)
    assert isinstance(finding, Finding)
    assert finding.severity is Severity.WARNING
    assert finding.title == (
        "4.2 MB of buffers of Net are broadcast in every step and are already the same on all ranks: mask"
    )
    assert finding.evidence[0].numbers["bytes_per_step"] == 4_194_304
    assert finding.evidence[0].numbers["broadcasts_per_step"] == 1.0
    assert "forward_sync_buffers=False" in finding.remedy


def test_the_remedy_names_the_option_that_the_version_has() -> None:
    (finding,) = buffers(JobBuilder(2, torch_version="2.6.0"), {"mask": 4_194_304}, CONSTANT)
    assert isinstance(finding, Finding)
    assert "Pass broadcast_buffers=False" in finding.remedy


def test_the_remedy_for_a_wrap_of_a_framework_names_the_options_of_frameworks() -> None:
    (finding,) = buffers(JobBuilder(2), {"mask": 4_194_304}, CONSTANT, by_user=False)
    assert isinstance(finding, Finding)
    assert "ddp_broadcast_buffers=False for the Trainer" in finding.remedy


def test_a_small_constant_buffer_is_advice() -> None:
    (finding,) = buffers(JobBuilder(2), {"mask": 4_096}, CONSTANT)
    assert isinstance(finding, Finding)
    assert finding.severity is Severity.ADVICE


def test_batch_norm_needs_its_broadcast() -> None:
    assert buffers(JobBuilder(2), {"mean": 256, "batches": 8, "mask": 4_096}, BATCH_NORM) == []


def test_a_large_constant_beside_batch_norm_is_reported_alone() -> None:
    (finding,) = buffers(JobBuilder(2), {"mean": 256, "batches": 8, "mask": 2_000_000}, BATCH_NORM)
    assert isinstance(finding, Finding)
    assert finding.evidence[0].numbers["bytes_per_step"] == 2_000_008
    assert "if the buffers that differ between ranks may stay different" in finding.remedy


SAME_CHANGES: Digests = {rank: [{"mean": str(step)} for step in range(3)] for rank in (0, 1)}


def test_statistics_that_are_equal_on_different_inputs_are_wasted() -> None:
    assert len(buffers(JobBuilder(2), {"mean": 256}, SAME_CHANGES)) == 1


def test_statistics_that_are_equal_on_equal_inputs_prove_nothing() -> None:
    assert buffers(JobBuilder(2), {"mean": 256}, SAME_CHANGES, equal_inputs=True) == []


def test_statistics_that_a_validation_has_broadcast_prove_nothing_and_their_counter_is_no_waste() -> None:
    job = JobBuilder(2)
    validated = [
        msgspec.structs.replace(entry, step=0, gradients=False, training=False, synchronised=False, input_digest="")
        if step % 2
        else entry
        for step in range(8)
        for rank in job.ranks
        for entry in (forward(rank, step, f"{rank} {step}"),)
    ]
    changes: Digests = {rank: [{"mean": str(n), "batches": str(n)} for n in range(3)] for rank in (0, 1)}
    assert buffers(job, {"mean": 256, "batches": 8}, changes, forwards=tuple(validated)) == []


@pytest.mark.parametrize("options", [{"broadcast_buffers": False}, {"forward_sync_buffers": False}])
def test_options_that_switch_the_broadcast_off_silence_it(options: dict[str, Any]) -> None:
    assert buffers(JobBuilder(2), {"mask": 4_194_304}, CONSTANT, **options) == []


def test_one_forward_is_not_enough() -> None:
    once: Digests = {rank: states[:1] for rank, states in CONSTANT.items()}
    assert buffers(JobBuilder(2), {"mask": 4_194_304}, once) == []
