"""Makes and removes the directory that a run writes its evidence to."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddpdoctor.directories import home_directory
from ddpdoctor.errors import ConfigurationError
from ddpdoctor.launch.box.start import remove_layers
from ddpdoctor.launch.created_files import remove_created
from ddpdoctor.launch.processes import is_alive
from ddpdoctor.record import layout


def state_directory() -> Path:
    """Where the tool keeps its state: ``$XDG_STATE_HOME/ddpdoctor``, by default under ``~/.local/state``.

    Raises RuntimeError where this user has no home.
    """
    base = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "ddpdoctor"
    home = home_directory()
    if home is None:
        raise RuntimeError("neither HOME nor the system names a home directory")
    return home / ".local" / "state" / "ddpdoctor"


@contextmanager
def temporary_run_directory() -> Iterator[Path]:
    """A new directory of mode 0700 that is gone afterwards.

    Raises ``ConfigurationError`` when neither the state directory nor the temporary one can be written.
    """
    _sweep()
    directory = _make()
    try:
        yield directory
    finally:
        remove_run_directory(directory)


def remove_run_directory(directory: Path) -> None:
    """Remove a run directory of ours, and the layers of an overlay in it; what is in the way of that stays."""
    remove_layers(directory)
    shutil.rmtree(directory, ignore_errors=True)


def _sweep() -> None:
    """Finish what a doctor that was killed left: files that its ranks made, and its run directory."""
    try:
        runs = state_directory() / "runs"
        abandoned = [directory for directory in runs.glob("rehearsal-*") if _is_abandoned(directory)]
    except (OSError, RuntimeError):
        return
    for directory in abandoned:
        remove_created(directory)
        remove_run_directory(directory)


def _is_abandoned(directory: Path) -> bool:
    """Tell whether the doctor who made a run directory is dead; a directory without a plan says nothing."""
    try:
        plan = json.loads((directory / layout.JOB_FILE).read_text(encoding="utf-8"))
        supervisor = int(plan["supervisor_pid"])
        keeps = bool(plan.get("keep", False))
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return not keeps and not is_alive(supervisor)


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
