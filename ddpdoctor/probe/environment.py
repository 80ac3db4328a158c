"""Notes which variables of the environment are set while the job runs: by the user's own lines, or by others."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, Optional

from .journal import Journal
from .plan import has_launcher
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


def _those_that_matter(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(PREFIXES)}
