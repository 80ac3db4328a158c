"""Hears what Python's audit events tell of the user's own calls; changes and refuses nothing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ...journal import Journal

Listener = Callable[[tuple[Any, ...]], None]
"""Called with the arguments of the event."""


def listen(journal: Journal, listeners: Mapping[str, Listener]) -> None:
    """Call a listener whenever its event happens; what happens inside a listener is not heard."""
    thread = threading.local()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in listeners or getattr(thread, "inside", False):
            return
        thread.inside = True
        try:
            journal.guarded(listeners[event], arguments)
        finally:
            thread.inside = False

    sys.addaudithook(hook)
