"""The lines of the user's that read a tensor's value in training, where the job is to run on GPUs.

Each such read makes a job on GPUs wait until its GPU has done all that was queued. On a CPU in the place of GPUs every
read of the training counts, for it is not known which tensors would be on a GPU there.
"""

from __future__ import annotations

from threading import get_ident
from types import FrameType
from typing import Any

from ...facts.tensor_reads import follow_reads, user_reader
from ...journal import Journal

NOTED = 4_000


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
        """Follow the reads, where the job may run on GPUs."""
        if self._journal.plan["job"]["machine"]["may_use_gpus"]:
            follow_reads(self._journal, self._tensor_class, self._is_watched, self._note_read)

    def _is_watched(self) -> bool:
        return get_ident() == self._thread and not self._is_compiling()

    def _note_read(self, name: str, tensor: Any, frame: FrameType, took_ns: int) -> None:
        journal = self._journal
        if not journal.optimizer_steps or journal.rank is None or self._noted >= NOTED:
            return
        if self._only_cuda and not tensor.is_cuda:
            return
        reader = user_reader(frame, journal.user_code)
        if reader is not None:
            self._noted += 1
            journal.event("tensor_read", method=name, site=journal.site(reader))
