"""Notes which variables of the environment the user's own lines set, and what they held before."""

from __future__ import annotations

import os
from typing import Any

from ..probe.journal import Journal
from .audit import calling_frame

NAMES = frozenset({"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"})
PREFIXES = ("TORCH_", "NCCL_", "GLOO_", "CUDA_")
NOTED = 100
_MARK_OF_LAUNCHER = "TORCHELASTIC_RUN_ID"


class Settings:
    """Listens to ``os.putenv``, which happens before ``os.environ`` knows the new value."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._noted = 0

    def put(self, arguments: tuple[Any, ...]) -> None:
        """A variable is being set."""
        name, value = (os.fsdecode(argument) for argument in arguments[:2])
        if (name in NAMES or name.startswith(PREFIXES)) and self._noted < NOTED:
            self._note_setting(name, value)

    def _note_setting(self, name: str, value: str) -> None:
        journal, frame = self._journal, calling_frame()
        if frame is None or not journal.user_code.holds(frame.f_code.co_filename) or journal.forked_from is not None:
            return
        self._noted += 1
        journal.event(
            "setting",
            name=name,
            value=value[:200],
            previous=os.environ.get(name),
            launched=_MARK_OF_LAUNCHER in os.environ,
            joined=journal.ring is not None,
            site=journal.site(frame),
        )
