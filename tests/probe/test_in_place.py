"""Numbers of a tensor are read where they lie only while they lie there."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch

from ddpdoctor.probe.nonfinite import Sample
from ddpdoctor.probe.torch_compat import in_place


def test_what_lies_in_memory_is_read_and_nothing_else() -> None:
    whole = torch.arange(8.0)
    assert list(in_place(whole, ctypes.c_float)) == whole.tolist()
    assert list(in_place(whole[6:], ctypes.c_float, 5)) == [6.0, 7.0]
    assert len(in_place(whole.double(), ctypes.c_char)) == 64
    assert len(in_place(torch.zeros(0), ctypes.c_float)) == 0
    whole.untyped_storage().resize_(0)
    assert len(in_place(whole, ctypes.c_float)) == 0


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("value", "is_broken"), [(math.nan, True), (math.inf, True), (-math.inf, True), (-1e300, None), (0.0, False)]
)
def test_a_parameter_is_broken_by_what_is_not_finite(kind: torch.dtype, value: float, is_broken: bool | None) -> None:
    parameter = torch.nn.Parameter(torch.ones(32, dtype=kind))
    sample = Sample(parameter)
    assert not sample.is_broken()
    with torch.no_grad():
        parameter[3] = max(value, torch.finfo(kind).min) if is_broken is None else value
    assert sample.is_broken() == bool(is_broken)
    with torch.no_grad():
        parameter.data = torch.ones(32, dtype=kind)
    assert not sample.is_broken()
