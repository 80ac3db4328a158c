"""Whether a rank sleeps, and when it wakes, so that it is not taken for a stuck one."""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

from ....record.clock import epoch_ns
from ...journal import Journal


def hook_sleep(journal: Journal) -> None:
    """Note while the main thread is in ``time.sleep``, and until when."""
    pause = time.sleep

    @functools.wraps(pause)
    def sleep(seconds: Any, /) -> None:
        if threading.current_thread() is not threading.main_thread():
            return pause(seconds)
        journal.sleeps_until_ns = journal.guarded(_end_ns, seconds, harms=("ranks",)) or 0
        try:
            pause(seconds)
        finally:
            journal.sleeps_until_ns = 0

    time.sleep = sleep


def _end_ns(seconds: Any) -> int:
    return min(epoch_ns() + int(seconds * 1e9), 1 << 62)
