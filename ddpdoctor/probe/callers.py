"""Who called, and in what kind of statement."""

from __future__ import annotations

import opcode
import os
import sys
from types import FrameType
from typing import Optional

GENERATOR = 0x20 | 0x200
"""Flags of the code of a generator and of an asynchronous one."""
_FOR_ITER = opcode.opmap["FOR_ITER"]
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PASSED_OVER = frozenset({os.__file__, "<frozen os>", "<frozen _collections_abc>", os.path.__file__})


def calling_frame() -> Optional[FrameType]:
    """The frame that called, seen through our own frames and those of ``os``; the caller says whose it is."""
    frame: Optional[FrameType] = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_filename.startswith(_OURS) or frame.f_code.co_filename in _PASSED_OVER
    ):
        frame = frame.f_back
    return frame


def loops(frame: FrameType) -> bool:
    """Tell whether a frame draws the next element for a ``for`` statement."""
    return frame.f_code.co_code[frame.f_lasti] == _FOR_ITER
