"""The processes of a watched job that run now: its launchers, its ranks, and what these have started.

All of them carry the run in the environment that they were started with. What a rank starts in a session of its own,
say an upload of the last checkpoint, is meant to outlive the job.
"""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ddpdoctor.launch.pid_namespaces import number_inside
from ddpdoctor.probe.process import RANK_PROCESS_VARIABLE
from ddpdoctor.record import layout
from ddpdoctor.record.assembly.ranks import RankBook
from ddpdoctor.record.events import typed
from ddpdoctor.record.reader import RunFiles

if TYPE_CHECKING:
    import psutil

_MOST_LETTERS = 80


class RunProcess(NamedTuple):
    """One of them."""

    pid: int
    command: str
    is_rank: bool
    starts_ranks: bool
    """It is a rank's parent, and no rank."""
    is_apart: bool
    """A rank has started it, in a session of its own."""


class RunProcesses:
    """Finds the processes of one run."""

    def __init__(self, directory: Path, since_s: float, session: int) -> None:
        """``since_s`` is when its launcher was started, on the system's clock, in the session ``session``."""
        self._directory = directory
        self._since_s = since_s
        self._session = session
        self._files = RunFiles(directory)
        self._book = RankBook()

    def living(self) -> list[RunProcess]:
        """Return those that live, without zombies and without us."""
        import psutil

        found: dict[int, tuple[psutil.Process, dict[str, str], int]] = {}
        for process in psutil.process_iter():
            try:
                # A shell in which the variable was exported by hand is older than the job.
                if process.pid == os.getpid() or process.create_time() < self._since_s - 1:
                    continue
                environment = process.environ()
                carries = environment.get(layout.RUN_VARIABLE) == str(self._directory)
                if carries and process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = process, environment, os.getsid(process.pid)
            except (psutil.Error, OSError):
                continue
        known = self._ranks()
        ranks = {pid for pid in found if number_inside(pid) in known}
        sessions = {self._session, *known, *(found[pid][2] for pid in ranks)}
        launchers = {pid for pid, (_, environment, _) in found.items() if "RANK" not in environment}
        parents = {_parent(found[pid][0]) for pid in ranks} - ranks
        return [
            RunProcess(
                pid=pid,
                command=_command(process),
                is_rank=pid in ranks,
                starts_ranks=pid in parents,
                is_apart=pid not in ranks
                and session not in sessions
                # What starts to be a rank has not said so yet; its parent is the launcher.
                and (RANK_PROCESS_VARIABLE in environment or _parent(process) not in launchers),
            )
            for pid, (process, environment, session) in found.items()
        ]

    def _ranks(self) -> set[int]:
        """Ranks of which anything is known, by their own numbers."""
        for pid, event in self._files.poll():
            with suppress(ValueError):
                self._book.take(pid, typed(event))
        return {pid for pid, entry in self._book.processes.items() if entry.rank is not None}


def _parent(process: psutil.Process) -> int:
    import psutil

    try:
        return process.ppid()
    except psutil.Error:
        return 0


def _command(process: psutil.Process) -> str:
    import psutil

    try:
        text = shlex.join(process.cmdline()) or process.name()
    except psutil.Error:
        return "?"
    return text if len(text) <= _MOST_LETTERS else text[: _MOST_LETTERS - 1] + "…"
