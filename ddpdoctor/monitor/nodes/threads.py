"""Threads that take no signals: what is kept back in the main thread would end the process in one that lets it in."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_signals() -> Iterator[None]:
    """Threads that are started meanwhile never take a signal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
