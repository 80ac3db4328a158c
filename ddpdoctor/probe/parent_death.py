"""Ends a process of a rehearsal with the one that started it, so that nothing outlives a doctor who was killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when ``parent`` dies, where it can: on Linux.

    For a process that its parent's main thread started: the signal comes when the thread that started it ends.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        process_control = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return
    process_control(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # It died before it was asked for.
