"""Parameters of models that come and go: their names, their digests and the memory that they need."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddpdoctor.probe.journal import Journal
from ddpdoctor.probe.observed import tensor_digest
from ddpdoctor.probe.rehearsal.surroundings import Need, free_bytes, need_of, shortage
from ddpdoctor.probe.rehearsal.training.ddp_modules import Modules
from ddpdoctor.probe.rehearsal.training.reduction import Reduction

# Which wrap a parameter belongs to, when models come and go.


def modules(directory: Path) -> Modules:
    nothing: Any = SimpleNamespace()
    return Modules(Journal(str(directory), {}), nothing, torch, lambda: (-1, -1, -1, False), nothing)


def watch(known: Modules, number: int, module: nn.Module) -> None:
    known._hook(Reduction(number, {}), module)


def test_a_new_model_is_never_taken_for_one_that_is_gone(tmp_path: Path) -> None:
    known = modules(tmp_path)
    for fold in range(50):
        model = nn.Linear(3, 2)
        assert known.name_of(model.weight) is None
        watch(known, fold, model)
        assert known.name_of(model.weight) == (fold, "weight")
        del model


def test_a_parameter_keeps_its_first_wrap(tmp_path: Path) -> None:
    known, model = modules(tmp_path), nn.Linear(3, 2)
    watch(known, 0, model)
    watch(known, 1, nn.Sequential(model))
    assert known.name_of(model.weight) == (0, "weight")


# Digests read memory by its address, so what has none of its own must be left alone.
ELSEWHERE = ctypes.create_string_buffer(16)


class Wrapping(torch.Tensor):  # type: ignore[misc]
    @staticmethod
    def __new__(cls, inner: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def data_ptr(self) -> int:
        return ctypes.addressof(ELSEWHERE)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        return arguments[0]


def test_a_tensor_that_wraps_others_has_no_digest() -> None:
    assert tensor_digest(Wrapping(torch.ones(4))) == ""
    assert tensor_digest(torch.nn.Parameter(Wrapping(torch.ones(4)))) == ""
    assert tensor_digest(torch.ones(4, device="meta")) == ""


def test_equal_bytes_have_equal_digests_and_a_sample_holds_head_and_tail() -> None:
    values = torch.arange(100_000.0)
    assert tensor_digest(values) == tensor_digest(torch.nn.Parameter(values.clone())) != ""
    assert tensor_digest(values) != tensor_digest(values.double())
    for index in (0, -1):
        changed = values.clone()
        changed[index] += 1
        assert tensor_digest(values, 4_096) != tensor_digest(changed, 4_096)
    assert tensor_digest(values.reshape(100, 1_000).t(), 4_096) != ""


# The memory that training a model needs, against what is free.


def _parameter(count: int, trained: bool = True, device: str = "cpu", size: int = 4) -> SimpleNamespace:
    return SimpleNamespace(
        device=SimpleNamespace(type=device), requires_grad=trained, numel=lambda: count, element_size=lambda: size
    )


def test_trained_parameters_need_sixteen_bytes_and_frozen_ones_their_own() -> None:
    parameters = [_parameter(1_000), _parameter(500, trained=False), _parameter(9_999, device="cuda")]
    assert need_of(parameters, ranks=2) == Need(1_500, 2 * (16_000 + 2_000), 2 * 12_000)


def test_a_shortage_is_said_with_its_numbers() -> None:
    need = Need(7_000_000_000, 224_000_000_000, 168_000_000_000)
    assert shortage(need, 168_000_000_000, 2) == ""
    assert shortage(need, None, 2) == ""
    assert shortage(need, 60_000_000_000, 2) == (
        "the model has 7,000,000,000 parameters: 2 ranks need 224.0 GB for weights, gradients and optimizer state, "
        "168.0 GB of it still to come, and 60.0 GB of memory are free"
    )


@pytest.mark.parametrize(("limit", "free"), [("max", 8_000 * 1024), ("5000000", 4_000_000), ("900000", 0)])
def test_a_container_has_less_than_its_machine(tmp_path: Path, limit: str, free: int) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    group = tmp_path / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(limit + "\n")
    (group / "memory.current").write_text("1000000\n")
    assert free_bytes(str(tmp_path)) == free


def test_where_nothing_is_known_nothing_is_said(tmp_path: Path) -> None:
    assert free_bytes(str(tmp_path)) is None
