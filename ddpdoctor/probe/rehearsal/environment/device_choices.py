"""Notes when a process chooses its GPU, and the barriers before that which have to guess it."""

from __future__ import annotations

import functools
import sys
from typing import Any

from ...journal import Journal

NOTED = 20


class DeviceChoices:
    """Patches ``torch.cuda.set_device`` and ``torch.distributed.barrier``."""

    def __init__(self, journal: Journal, torch: Any) -> None:
        self._journal = journal
        self._torch = torch
        self._chosen = 0
        self._early = 0

    def install(self) -> None:
        """Replace both functions; what they do stays the same."""
        cuda, distributed, journal = self._torch.cuda, self._torch.distributed, self._journal
        choose = cuda.set_device

        @functools.wraps(choose)
        def set_device(device: Any) -> Any:
            result = choose(device)
            journal.guarded(self._note_choice, sys._getframe(1), harms=("device_choices",))
            return result

        cuda.set_device = set_device
        if not distributed.is_available():
            return
        wait = distributed.barrier

        @functools.wraps(wait)
        def barrier(*arguments: Any, **options: Any) -> Any:
            if not self._chosen and options.get("device_ids") is None:
                journal.guarded(self._note_early, sys._getframe(1), harms=("device_choices",))
            return wait(*arguments, **options)

        distributed.barrier = barrier

    def _note_choice(self, frame: Any) -> None:
        self._chosen += 1
        if self._chosen <= NOTED:
            self._journal.event("device_choice", chosen=True, site=self._journal.site(frame))

    def _note_early(self, frame: Any) -> None:
        self._early += 1
        if self._early <= NOTED and self._journal.user_code.holds(frame.f_code.co_filename):
            self._journal.event("device_choice", chosen=False, site=self._journal.site(frame))
