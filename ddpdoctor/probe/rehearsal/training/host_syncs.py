"""Notes the lines of the user's that read a tensor's value in training, where the job is to run on GPUs.

Each such read makes a job on GPUs wait until its GPU has done all that it was asked for. On a CPU in the place of GPUs
every read of the training counts, for nothing tells which tensors would be on a GPU there.
"""

from __future__ import annotations

import functools
import sys
from threading import get_ident
from types import FrameType
from typing import Any, Callable, Optional

from ...journal import Journal
from ...user_code import leave_no_frame

METHODS = ("item", "cpu", "tolist", "__bool__", "__float__", "__int__")
NOTED = 4_000
_PRINTING = ("/torch/_tensor_str.py", "/torch/_tensor.py")
"""The files of torch through which a tensor is printed or formatted."""


class HostReads:
    """The reads of one rank, from its first optimizer step on."""

    def __init__(self, journal: Journal, torch: Any) -> None:
        self._journal = journal
        self._tensor_class = torch.Tensor
        self._is_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", lambda: False)
        self._only_cuda = journal.plan.get("device") == "cuda"
        self._thread = get_ident()
        self._noted = 0

    def install(self) -> None:
        """Replace the reading methods, where the job may run on GPUs."""
        if not self._journal.plan["job"]["machine"]["may_use_gpus"]:
            return
        for name in METHODS:
            method = getattr(self._tensor_class, name, None)
            if method is not None:
                setattr(self._tensor_class, name, self._counted(name, method))

    def _counted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        reads, is_compiling = self, self._is_compiling

        @functools.wraps(method)
        def read(tensor: Any, *arguments: Any, **options: Any) -> Any:
            if is_compiling() or get_ident() != reads._thread:
                return method(tensor, *arguments, **options)
            try:
                return method(tensor, *arguments, **options)
            except BaseException as error:
                leave_no_frame(error)
                raise
            finally:
                reads._journal.guarded(
                    reads._note_read, name, tensor, sys._getframe(1), harms=("host_reads", "tensor_reads")
                )

        return read

    def _note_read(self, name: str, tensor: Any, frame: Optional[FrameType]) -> None:
        journal = self._journal
        if not journal.optimizer_steps or journal.rank is None or self._noted >= NOTED:
            return
        if self._only_cuda and not tensor.is_cuda:
            return
        while frame is not None and frame.f_code.co_filename.endswith(_PRINTING):
            frame = frame.f_back
        if frame is None or not journal.user_code.holds(frame.f_code.co_filename):
            return
        self._noted += 1
        journal.event("tensor_read", method=name, site=journal.site(frame))
