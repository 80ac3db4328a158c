"""A place for what a program of the tests writes: gone when the program ends, also when it is told to end."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """A directory that is there for the time of the context, in which SIGTERM raises an exception, as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with tempfile.TemporaryDirectory(prefix="ddpdoctor-tests-", ignore_cleanup_errors=True) as directory:
            yield Path(directory)
    finally:
        signal.signal(signal.SIGTERM, before)
