"""Finds the watched jobs that run on this machine: by the environment of this user's processes."""

from __future__ import annotations

import os
from pathlib import Path

from ddpdoctor.errors import RecordError, UsageError
from ddpdoctor.launch.runs.kept_runs import belongs, live_processes
from ddpdoctor.record import layout
from ddpdoctor.record.clock import kept_elsewhere, share_clock
from ddpdoctor.record.plan import read_plan


def find_run(named: str | None) -> tuple[Path, tuple[Path, ...]]:
    """Return the run to attach to, and the other live runs of this user, newest first.

    Raises UsageError when none runs, and RecordError when the named one cannot be read.
    """
    if named is not None:
        directory = Path(named).absolute()
        plan = read_plan(directory)
        if host := kept_elsewhere(plan.clock):
            listens = (directory / layout.ATTACH_FILE).is_file()
            watch = f"`ddpdoctor profile --attach {named}` asks its monitor" if listens else f"Watch it on {host}"
            raise UsageError(
                f"the run in {named} was started on {host}, and cannot be watched from here",
                f"{watch}, if it goes on; `ddpdoctor report {named}` shows what was recorded.",
            )
        share_clock(plan.clock)
        if not live_processes(directory) and not belongs(plan.launcher_pid or 0, directory):
            raise UsageError(f"the run in {named} is over", f"`ddpdoctor report {named}` shows what was recorded.")
        return directory, ()
    runs = live_runs()
    if not runs:
        raise UsageError(
            "none of your watched jobs runs on this machine",
            "Start one with `ddpdoctor profile train.py`; for other launchers `ddpdoctor profile --env` prints two "
            "variables that they must pass on.",
        )
    return runs[0], tuple(runs[1:])


def live_runs() -> list[Path]:
    """Run directories that a living process of this user writes to, newest first."""
    import psutil

    named: set[str] = set()
    for process in psutil.process_iter():
        try:
            if process.uids().real == os.getuid():
                named.add(process.environ().get(layout.RUN_VARIABLE, ""))
        except (psutil.Error, OSError):
            continue
    return sorted((Path(name) for name in named - {""} if _is_live(Path(name))), key=_born, reverse=True)


def _is_live(directory: Path) -> bool:
    try:
        return read_plan(directory).kind == "run" and bool(live_processes(directory))
    except RecordError:
        return False


def _born(directory: Path) -> float:
    try:
        return (directory / layout.JOB_FILE).stat().st_mtime
    except OSError:
        return 0.0
