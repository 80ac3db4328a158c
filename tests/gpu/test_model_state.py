from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from ddpdoctor.checks.gradients import model_state_too_large
from ddpdoctor.finding import Finding
from ddpdoctor.probe.observed import MEASURED_AT_STEP, OptimizerSizes
from ddpdoctor.record.model import RunRecord, TensorInfo, Wrap
from ddpdoctor.record.streams.measured import OptimizerSize
from tests.gpu.jobs import gpu, looks, record

GIB = 1 << 30


def run(scale: float, *, view: bool = False) -> RunRecord:
    """One rank on 80 GiB whose weights take ``scale`` GiB, with Adam."""
    size = int(scale * GIB)
    wrap = Wrap(
        rank=0,
        wrap=0,
        options={"gradient_as_bucket_view": view},
        parameters=(TensorInfo(name="weight", size_bytes=size, requires_grad=True),),
    )
    adam = OptimizerSize(rank=0, type="AdamW", parameter_bytes=size, gradient_bytes=size, state_bytes=2 * size)
    return msgspec.structs.replace(record([gpu(0, looks())]), wraps=(wrap,), optimizer_sizes=(adam,))


def test_a_state_that_takes_most_of_the_memory_is_reported() -> None:
    (finding,) = model_state_too_large.in_run(run(12))
    assert isinstance(finding, Finding)
    assert finding.title == "weights, gradients and optimizer take 75% of the GPU's memory"
    assert [fact.text for fact in finding.evidence] == [
        "weights: 12.0 GiB of 80 GiB",
        "gradients: 12.0 GiB of 80 GiB",
        "DDP's buckets: 12.0 GiB of 80 GiB",
        "the state of AdamW: 24.0 GiB of 80 GiB",
        "20.0 GiB are left for the activations of a batch",
    ]


def test_a_state_that_leaves_room_is_not_reported() -> None:
    assert list(model_state_too_large.in_run(run(9))) == []
    assert list(model_state_too_large.in_run(run(11, view=True))) == []
    assert list(model_state_too_large.in_run(msgspec.structs.replace(run(12), optimizer_sizes=()))) == []


def test_a_project_sets_its_own_share() -> None:
    state = run(12)
    allowed = msgspec.structs.replace(state.job, thresholds={"model-state-too-large": 0.8})
    assert list(model_state_too_large.in_run(msgspec.structs.replace(state, job=allowed))) == []


class OnGpu(torch.Tensor):  # type: ignore[misc]
    is_cuda = True


def test_an_optimizer_is_measured_once() -> None:
    told: list[dict[str, Any]] = []
    journal = SimpleNamespace(event=lambda name, **fields: told.append({"event": name, **fields}))
    weight = torch.nn.Parameter(torch.ones(10))
    optimizer = torch.optim.Adam([weight])
    sizes = OptimizerSizes(journal, torch)  # type: ignore[arg-type]
    for _ in range(MEASURED_AT_STEP + 5):
        weight.sum().backward()
        optimizer.step()
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].as_subclass(OnGpu)
        sizes.stepped(optimizer)
    nothing = {"parameter_bytes": 0, "gradient_bytes": 0, "shares_state": False, "device_memory_bytes": 0}
    assert told == [{"event": "optimizer_size", "type": "Adam", "state_bytes": 40, **nothing}]


def test_parameters_of_an_optimizer_inside_another_one_are_counted_once() -> None:
    told: list[dict[str, Any]] = []
    journal = SimpleNamespace(event=lambda name, **fields: told.append(fields))
    sizes = OptimizerSizes(journal, torch, 1, any_device=True)  # type: ignore[arg-type]
    weights = [torch.nn.Parameter(torch.ones(10)) for _ in range(2)]
    inner, outer = torch.optim.SGD(weights[:1]), torch.optim.SGD(weights)
    sum(weight.sum() for weight in weights).backward()
    for optimizer in (inner, outer):
        sizes.stepped(optimizer)
    assert [(size["parameter_bytes"], size["gradient_bytes"]) for size in told] == [(40, 40), (40, 40)]
