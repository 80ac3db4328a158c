"""Makes and removes the directory that a run writes its evidence to."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddpdoctor.errors import ConfigurationError


def state_directory() -> Path:
    """Where the tool keeps its state: ``$XDG_STATE_HOME/ddpdoctor``, by default under ``~/.local/state``."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state") / "ddpdoctor"


@contextmanager
def temporary_run_directory() -> Iterator[Path]:
    """A new directory of mode 0700 that is gone afterwards.

    Raises ``ConfigurationError`` when neither the state directory nor the temporary one can be written.
    """
    directory = _make()
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _make() -> Path:
    prefix = time.strftime("rehearsal-%Y%m%d-%H%M%S-")
    try:
        runs = state_directory() / "runs"
        runs.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=prefix, dir=runs))
    except (OSError, RuntimeError):
        pass
    try:
        return Path(tempfile.mkdtemp(prefix="ddpdoctor-" + prefix))
    except OSError as error:
        raise ConfigurationError(
            f"no directory for the run could be made: {error}", "set XDG_STATE_HOME to a directory that can be written"
        ) from error
