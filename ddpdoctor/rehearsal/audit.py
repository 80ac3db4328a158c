"""Hears what Python's audit events tell of the user's own calls; changes and refuses nothing."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, Optional

from ..probe.journal import Journal

Listener = Callable[[tuple[Any, ...]], None]
"""Called with the arguments of the event."""

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PASSED_OVER = frozenset({os.__file__, "<frozen os>", "<frozen _collections_abc>", os.path.__file__})


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


def calling_frame() -> Optional[FrameType]:
    """The frame that called, seen through our own frames and those of ``os``; the caller says whose it is."""
    frame: Optional[FrameType] = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_filename.startswith(_OURS) or frame.f_code.co_filename in _PASSED_OVER
    ):
        frame = frame.f_back
    return frame
