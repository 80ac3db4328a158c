"""On how many threads torch computes in a rank, and whether anybody asked for so many."""

from __future__ import annotations

import functools
from typing import Any

from ...journal import Journal


class CpuThreads:
    """Tells it at the first optimizer step: what a script sets, it has set by then."""

    def __init__(self, journal: Journal, torch: Any) -> None:
        self._journal = journal
        self._torch = torch
        self._set = False

    def install(self) -> None:
        """Listen to ``torch.set_num_threads``."""
        torch, threads = self._torch, self
        choose = torch.set_num_threads

        @functools.wraps(choose)
        def set_num_threads(*arguments: Any, **options: Any) -> Any:
            threads._set = True
            return choose(*arguments, **options)

        torch.set_num_threads = set_num_threads

    def note_threads(self) -> None:
        """Write it down."""
        chosen = self._set or bool(self._journal.plan.get("threads_chosen"))
        self._journal.event("cpu_threads", threads=int(self._torch.get_num_threads()), chosen=chosen)
