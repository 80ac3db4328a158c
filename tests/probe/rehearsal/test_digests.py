"""Digests read memory by its address, so what has none of its own must be left alone."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from ddpdoctor.probe.observed import tensor_digest

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
