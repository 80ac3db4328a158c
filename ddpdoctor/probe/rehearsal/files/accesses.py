"""Accesses to files, by audit events."""

from __future__ import annotations

import functools
import genericpath
import os
import pathlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from itertools import islice
from types import FrameType
from typing import Any, Optional

from ...journal import Journal
from ...user_code import beyond, calling_frame, outwards
from .created_log import UnresolvablePath, name_path, status_of_target, target_path

POLLED_AFTER = 3
"""A path that is queried so often, with nothing but sleep between, is polled."""
_PATHS_HELD = 64


class Polling:
    """The main thread's queries of paths, and their results, since it last did anything else."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._activity: tuple[int, ...] = ()
        self._queries: dict[tuple[int, str, bool], tuple[int, int]] = {}
        """How often each line has queried each path with this result, and since when."""

    def queried(self, path: str, site: int, *, found: bool) -> None:
        """Count a query of whether there is a path by a line of the user's, or an attempt in vain to read it."""
        ring = self._journal.ring
        if ring is None or threading.current_thread() is not threading.main_thread():
            return
        journal = self._journal
        activity = (ring.count, journal.forwards, journal.backwards, journal.optimizer_steps)
        other_answer = (site, path, not found) in self._queries
        if other_answer or activity != self._activity or len(self._queries) >= _PATHS_HELD:
            self.did_something()
            self._activity = activity
        now_ns = time.time_ns()
        times, since_ns = self._queries.get((site, path, found), (0, now_ns))
        self._queries[site, path, found] = times + 1, since_ns
        if times + 1 >= POLLED_AFTER:
            ring.note_polling(since_ns, now_ns)

    def did_something(self) -> None:
        """Forget the earlier queries."""
        self._queries.clear()
        if self._journal.ring is not None:
            self._journal.ring.note_polling(0, 0)


NOTED = 4_000
NOTED_ALIKE = 4
"""So often the same access of one line to one path is noted."""
_CHANGES = os.O_WRONLY | os.O_RDWR
_PYTHONS = (".py", ".pyc", ".so", ".pth")
_INSTALLED = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
_SYSTEM = ("/proc/", "/sys/", "/dev/")
_ITS_CALLERS = frozenset({"<frozen os>", os.__file__, pathlib.__file__, shutil.__file__, genericpath.__file__})
_FETCHERS = ("zipfile", "tarfile", "urllib", "requests", "httpx", "gdown", "huggingface_hub", "wget", "fsspec")
_FETCHING_FILES = (os.path.join("torch", "hub.py"), os.path.join("torchvision", "datasets", "utils.py"))
_DEPTH = 40
_CHECKS = ("exists", "isfile", "isdir", "lexists")
_PATH_CHECKS = ("exists", "is_file", "is_dir")


class Accesses:
    """Listeners at audit events and at the functions that query whether a path exists."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._polling = Polling(journal)
        self._noted: dict[tuple[str, str, int, bool], int] = {}
        self._total = 0
        self._began_ns = int((journal.plan.get("job") or {}).get("started_ns", 0))
        self._run_directory = os.path.realpath(journal.run_directory) + os.sep
        self._libraries = tuple({os.path.realpath(root) + os.sep + "lib" for root in (sys.prefix, sys.base_prefix)})

    def listeners(self) -> dict[str, Callable[[tuple[Any, ...]], None]]:
        """Return what to call for which audit event."""
        return {
            "open": self._opened,
            "os.mkdir": lambda given: self._named("make", given[0], _at(given, 2)),
            "os.remove": lambda given: self._named("remove", given[0], _at(given, 1)),
            "os.rmdir": lambda given: self._named("remove", given[0], _at(given, 1)),
            "shutil.rmtree": lambda given: self._named("remove", given[0], _at(given, 1)),
            "os.rename": lambda given: self._named("move", given[0], _at(given, 2)),
            "fcntl.flock": self._locked,
            "fcntl.lockf": self._locked,
        }

    def install(self) -> None:
        """Patch the functions that query whether a path exists; only the user's own calls are noted."""
        for name in _CHECKS:
            # Where pickle looks for it, it has to be the same function.
            self._hook(name, os.path, sys.modules[getattr(os.path, name).__module__])
        for name in _PATH_CHECKS:
            self._hook(name, pathlib.Path)

    def _hook(self, name: str, *owners: Any) -> None:
        query, accesses, holds = getattr(owners[0], name), self, self._journal.user_code.holds

        @functools.wraps(query)
        def query_noted(path: Any, *arguments: Any, **options: Any) -> Any:
            answer = query(path, *arguments, **options)
            if holds(sys._getframe(1).f_code.co_filename):
                accesses._journal.guarded(accesses._note_check, path, bool(answer), harms=("accesses",))
            return answer

        for owner in owners:
            setattr(owner, name, query_noted)

    def _note_check(self, path: Any, found: bool) -> None:
        name = target_path(path)
        if name is not None and self._is_of_interest(name):
            self._note_access("check", name, found)

    def _opened(self, given: tuple[Any, ...]) -> None:
        path, flags = given[0], _at(given, 2)
        if not isinstance(path, (str, bytes)) or not isinstance(flags, int):
            return
        text = os.fsdecode(path)
        if text.endswith(_PYTHONS) or text.startswith(_SYSTEM):
            return
        name = target_path(text)
        if name is None or not self._is_of_interest(name):
            return
        status = status_of_target(name)
        if flags & os.O_EXCL and flags & os.O_CREAT:
            self._note_access("lock", name, status is not None)
        if flags & _CHANGES:
            self._note_access("write", name, status is not None)
        elif status is None or max(status.st_mtime_ns, status.st_ctime_ns) >= self._began_ns:
            self._note_access("read", name, status is not None)

    def _named(self, action: str, path: object, dir_fd: object) -> None:
        frame = beyond(calling_frame(), _ITS_CALLERS)
        if frame is None or not self._journal.user_code.holds(frame.f_code.co_filename):
            return
        try:
            name = name_path(path, dir_fd)
        except UnresolvablePath:
            return
        if name is not None and self._is_of_interest(name):
            self._note_access(action, name, status_of_target(name) is not None)

    def _locked(self, given: tuple[Any, ...]) -> None:
        try:
            descriptor = given[0] if isinstance(given[0], int) else given[0].fileno()
            path = os.readlink(f"/proc/self/fd/{descriptor}")
        except (OSError, AttributeError):
            path = ""
        if not path.startswith(self._run_directory):  # Ours: it orders nothing that the ranks do.
            self._note_access("lock", path, True, "flock")

    def _is_of_interest(self, name: str) -> bool:
        if self._total >= NOTED or name.startswith((self._run_directory, *_SYSTEM, *self._libraries)):
            return False
        return not any(part in name for part in _INSTALLED)

    def _note_access(self, action: str, path: str, found: bool, through: str = "") -> None:
        journal, frame = self._journal, calling_frame()
        site = journal.site(frame)
        key = (action, path, site, found)
        times = self._noted[key] = self._noted.get(key, 0) + 1
        if site >= 0 and (action == "check" or (action == "read" and not found)):
            self._polling.queried(path, site, found=found)
        elif site >= 0:
            self._polling.did_something()
        if site < 0 or times > NOTED_ALIKE:
            return
        self._total += 1
        through = through or _fetcher(sys._getframe(1))
        journal.event("access", action=action, path=path, site=site, found=found, through=through)


def _fetcher(frame: Optional[FrameType]) -> str:
    """Return the library that fetches or extracts and stands between the user and the call, or an empty text."""
    for one in islice(outwards(frame), _DEPTH):
        package = str(one.f_globals.get("__name__", "")).partition(".")[0]
        if package in _FETCHERS or one.f_code.co_filename.endswith(_FETCHING_FILES):
            return package
    return ""


def _at(given: tuple[Any, ...], position: int) -> Any:
    return given[position] if position < len(given) else None


Listener = Callable[[tuple[Any, ...]], None]
"""Called with the arguments of the event."""


def listen(journal: Journal, listeners: Mapping[str, Listener]) -> None:
    """Call a listener whenever its event happens; what happens inside a listener does not count."""
    thread = threading.local()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in listeners or getattr(thread, "inside", False):
            return
        thread.inside = True
        try:
            journal.guarded(listeners[event], arguments, harms=("accesses",))
        finally:
            thread.inside = False

    sys.addaudithook(hook)
