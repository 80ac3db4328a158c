"""On how many threads torch computes in a rank, and whether so many were chosen."""

from __future__ import annotations

from types import FrameType
from typing import Any

from ...call_listeners import on_call
from ...journal import Journal


class CpuThreads:
    """Reported at the first optimizer step: what a script sets, it has set by then."""

    def __init__(self, journal: Journal, torch: Any) -> None:
        self._journal = journal
        self._torch = torch
        self._set = False

    def install(self) -> None:
        """Listen to ``torch.set_num_threads``."""
        on_call(self._journal, self._torch, "set_num_threads", before=self._chosen, harms=("cpu_threads",))

    def note_threads(self) -> None:
        """Write the number of threads."""
        chosen = self._set or bool(self._journal.plan.get("threads_chosen"))
        self._journal.event("cpu_threads", threads=int(self._torch.get_num_threads()), chosen=chosen)

    def _chosen(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._set = True
