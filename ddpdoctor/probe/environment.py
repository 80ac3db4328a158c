"""Notes which variables of the environment are set while the job runs: by the user's own lines, or by others."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, Optional

from ..record import layout
from ..record.writer import kept_clock
from .journal import Journal
from .user_code import calling_frame

NAMES = frozenset({"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "OMP_NUM_THREADS"})
PREFIXES = ("TORCH_", "NCCL_", "GLOO_", "CUDA_")
NOTED = 100


class Settings:
    """The settings of one process. ``has_joined`` returns whether its process group has been made."""

    def __init__(self, journal: Journal, has_joined: Callable[[], bool]) -> None:
        self._journal = journal
        self._has_joined = has_joined
        self._noted = 0
        self._pid = os.getpid()
        self._inherited = _those_that_matter(os.environ)
        self._explained = self._at_start()
        """The environment of the job's start, with what the user's lines in this process made of it."""

    def listen(self) -> None:
        """Hook ``os.environ`` itself, because audit events would cost the job too much."""
        put, remove, settings = os.putenv, os.unsetenv, self

        def putenv(name: Any, value: Any, /) -> None:
            put(name, value)
            settings._journal.guarded(settings.put, (name, value), harms=("settings",))

        def unsetenv(name: Any, /) -> None:
            remove(name)
            settings._journal.guarded(settings.remove, (name,), harms=("settings",))

        os.putenv, os.unsetenv = putenv, unsetenv

    def put(self, arguments: tuple[Any, ...]) -> None:
        """Note a variable that is being set; ``os.environ`` has not the new value yet."""
        name, value = (os.fsdecode(argument) for argument in arguments[:2])
        if (name in NAMES or name.startswith(PREFIXES)) and self._noted < NOTED:
            self._note_setting(name, value, calling_frame())

    def remove(self, arguments: tuple[Any, ...]) -> None:
        """Note a variable that is being removed."""
        name = os.fsdecode(arguments[0])
        if name.startswith(PREFIXES) and self._noted < NOTED and name in os.environ:
            self._note_setting(name, None, calling_frame())

    def note_others(self) -> None:
        """Note what others have set: a launcher, a process that started this one, a library."""
        found = _those_that_matter(os.environ)
        if self._pid != os.getpid():
            self._explained = self._at_start()  # What the process that forked this one did was never written.
        for name in sorted(found.keys() | self._explained.keys()):
            value = found.get(name)
            if value != self._explained.get(name) and self._noted < NOTED:
                self._put_event(name, value, None, imported=value != self._inherited.get(name))

    def _at_start(self) -> dict[str, str]:
        return _those_that_matter(self._journal.plan.get("job", {}).get("environment") or os.environ)

    def _note_setting(self, name: str, value: Optional[str], frame: Optional[FrameType]) -> None:
        journal = self._journal
        if frame is None or not journal.user_code.holds(frame.f_code.co_filename) or journal.forked_from is not None:
            return
        self._put_event(name, value, frame, imported="torch.distributed" in sys.modules)

    def _put_event(self, name: str, value: Optional[str], frame: Optional[FrameType], *, imported: bool) -> None:
        self._noted += 1
        if value is None:
            self._explained.pop(name, None)
        elif name.startswith(PREFIXES):
            self._explained[name] = value
        self._journal.event(
            "setting",
            name=name,
            value="" if value is None else value[:200],
            removed=value is None,
            previous=os.environ.get(name),
            launched=has_launcher(self._journal.plan),
            imported=imported,
            joined=self._has_joined(),
            site=-1 if frame is None else self._journal.site(frame),
        )


def number_in(variable: str) -> Optional[int]:
    """Return the number that a variable of the environment holds; None where it holds none."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else None


def _those_that_matter(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(PREFIXES)}


# The plan of a run, made here where the run was started without the doctor.

KEPT = ("TORCH", "NCCL", "GLOO", "CUDA", "OMP_", "MASTER_", "SLURM", "PYTHON")
"""Beginnings of the names of variables that bear on a job."""


_MOST_CHARACTERS = 1 << 24


def plan_of(run_directory: str) -> dict[str, Any]:
    """Return the content of ``job.json``; the first process of a job without a plan writes it.

    Raises ``OSError`` where the directory can be neither read nor made, ``ValueError`` when the file is damaged.
    """
    path = os.path.join(run_directory, layout.JOB_FILE)
    try:
        return _read(path)
    except FileNotFoundError:
        pass
    os.makedirs(run_directory, mode=0o700, exist_ok=True)
    mine = f"{path}.{os.getpid()}"
    with open(mine, "w", encoding="utf-8") as file:
        json.dump(_unplanned(), file)
    try:
        os.link(mine, path)  # Unlike a rename it leaves alone what another process has made meanwhile.
    except FileExistsError:
        pass
    except OSError:
        os.rename(mine, path)
        return _read(path)
    os.unlink(mine)
    return _read(path)


def recorded_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that bear on a job; nothing else of the user's environment enters a record."""
    return {name: value for name, value in sorted(environment.items()) if name.startswith(KEPT)}


def has_launcher(plan: dict[str, Any]) -> bool:
    """Return whether torch's launcher set the rendezvous of this process, as the user starts the job."""
    return "TORCHELASTIC_RUN_ID" in os.environ and bool(plan.get("has_launcher", True))


def _read(path: str) -> dict[str, Any]:
    # Should another program have put a pipe or a device in its place, no process of the job may wait for that.
    with open(path, encoding="utf-8", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        plan = json.loads(file.read(_MOST_CHARACTERS))
    if not isinstance(plan, dict):
        raise ValueError(f"{path} holds no plan")
    return plan


def _unplanned() -> dict[str, Any]:
    """Return the plan of a run of which nothing is known but this process."""
    arguments = list(getattr(sys, "orig_argv", sys.argv))
    script = next((part for part in arguments[1:] if part.endswith(".py")), "")
    return {
        "version": layout.VERSION,
        "kind": "run",
        "clock": kept_clock(),
        "project_root": os.getcwd(),
        "job": {
            "kind": "run",
            "command": arguments,
            "script": os.path.abspath(script) if script else "",
            "environment": recorded_environment(os.environ),
            "python": sys.executable,
            "ranks_expected": number_in("WORLD_SIZE") or 0,
            "started_ns": time.time_ns(),
        },
    }
