"""Numbers of a tensor are read where they lie only while they lie there."""

from __future__ import annotations

import ctypes

import torch

from ddpdoctor.probe.torch_compat import in_place


def test_what_lies_in_memory_is_read_and_nothing_else() -> None:
    whole = torch.arange(8.0)
    assert list(in_place(whole, ctypes.c_float)) == whole.tolist()
    assert list(in_place(whole[6:], ctypes.c_float, 5)) == [6.0, 7.0]
    assert len(in_place(whole.double(), ctypes.c_char)) == 64
    assert len(in_place(torch.zeros(0), ctypes.c_float)) == 0
    whole.untyped_storage().resize_(0)
    assert len(in_place(whole, ctypes.c_float)) == 0
