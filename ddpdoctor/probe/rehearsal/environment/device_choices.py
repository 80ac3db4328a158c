"""When a process chooses its GPU, and the barriers before that which have to guess it."""

from __future__ import annotations

from types import FrameType
from typing import Any

from ...call_listeners import on_call
from ...journal import Journal

NOTED = 20


class DeviceChoices:
    """Listeners at ``torch.cuda.set_device`` and ``torch.distributed.barrier``."""

    def __init__(self, journal: Journal, torch: Any) -> None:
        self._journal = journal
        self._torch = torch
        self._chosen = 0
        self._early = 0

    def install(self) -> None:
        """Listen to both functions."""
        cuda, distributed, journal = self._torch.cuda, self._torch.distributed, self._journal
        on_call(journal, cuda, "set_device", after=self._note_choice, harms=("device_choices",))
        if distributed.is_available():
            on_call(journal, distributed, "barrier", before=self._note_early, harms=("device_choices",))

    def _note_choice(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._chosen += 1
        if self._chosen <= NOTED:
            self._journal.event("device_choice", chosen=True, site=self._journal.site(frame))

    def _note_early(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if self._chosen or options.get("device_ids") is not None:
            return
        self._early += 1
        if self._early <= NOTED and self._journal.user_code.holds(frame.f_code.co_filename):
            self._journal.event("device_choice", chosen=False, site=self._journal.site(frame))
