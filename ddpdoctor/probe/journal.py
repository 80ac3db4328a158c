"""The state of this process: its rank, its counters, and the files that it writes its evidence to."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from types import CodeType, FrameType
from typing import Any, Callable, Optional, TypeVar

from ..record.writer import CollectiveRing, EventWriter, epoch_ns
from .user_code import UserCode

Result = TypeVar("Result")

_MOST_HELD = 1_000
_MOST_CHAINS = 10_000
"""Code that is made anew all the time makes a new chain each time."""


class Journal:
    """The one mutable place of a probe; every hook writes through it."""

    def __init__(self, run_directory: str, plan: dict[str, Any]) -> None:
        self.run_directory = run_directory
        self.pid = os.getpid()
        self.plan = plan
        """What ``job.json`` holds."""
        self.writer = EventWriter(run_directory, lazily=plan.get("kind") in ("run", "warm"))
        self.user_code = UserCode(str(plan.get("project_root", "")))
        self.rank: Optional[int] = None
        """Known from the environment or from ``init_process_group``; None in other processes of the job."""
        self.ring: Optional[CollectiveRing] = None
        self.started: deque[tuple[int, Any]] = deque()
        """Rows that were started since the last look, with their work."""
        self._outstanding: list[tuple[int, Any]] = []
        self._settling = threading.Lock()
        self.forked_from: Optional[int] = None
        """The rank whose process forked this one."""
        self.forwards = 0
        self.backwards = 0
        self.optimizer_steps = 0
        self.on_beat: Callable[[], None] = lambda: None
        """Called a few times a second from the heartbeat's thread: what must outlive the process is written then."""
        self.step = 0
        """Count of training forwards with the call chain of the newest one."""
        self.forward_site = -1
        self.sleeps_until_ns = 0
        """When the sleep ends that the main thread is in; 0 when it is in none."""
        self.waits = False
        """At the newest heartbeat the main thread waited in a collective."""
        self._sites: dict[object, int] = {}
        self._chains: dict[tuple[int, ...], tuple[int, tuple[CodeType, ...]]] = {}
        """Number of the site of each chain of instructions; holds their code, for its ``id`` must not be used again."""
        self._signatures: dict[object, int] = {}
        self._lock = threading.Lock()
        self._held: Optional[list[tuple[str, dict[str, Any]]]] = None
        """Events of a process that leaves no trace unless it becomes a rank."""

    def hold(self) -> None:
        """Keep events in memory until ``release``."""
        self._held = []

    def release(self) -> None:
        """Write what was held, as this process is a rank."""
        held, self._held = self._held, None
        for event, fields in held or ():
            self.event(event, **fields)

    @property
    def is_rank(self) -> bool:
        """Whether this very process is a rank, and not a worker that a rank forked."""
        return self.rank is not None and self.ring is not None

    @property
    def may_be_rank(self) -> bool:
        """Whether this process is a rank, or may yet become one because the script starts its ranks itself."""
        return self.rank is not None or (bool(self.plan.get("spawns_ranks")) and self.forked_from is None)

    def event(self, event: str, **fields: Any) -> None:
        """Write one event."""
        if self._held is not None:
            if len(self._held) < _MOST_HELD:
                self._held.append((event, {"time_ns": epoch_ns(), **fields}))
            return
        self.writer.write(event, **fields)
        if self.writer.lost and self.ring is not None:
            self.ring.note_lost(self.writer.lost)

    def site(self, frame: Optional[FrameType]) -> int:
        """Return the number of the user's call chain that ends at ``frame``; -1 when there is none."""
        chain = self.user_code.instructions(frame)
        known = self._chains.get(chain)
        if known is not None:
            return known[0]
        frames = self.user_code.frames_here(frame)
        number = self.site_of(frames) if frames else -1
        if chain and len(self._chains) < _MOST_CHAINS:
            self._chains[chain] = number, self.user_code.code(frame)
        return number

    def site_of(self, frames: tuple[tuple[str, int, str], ...]) -> int:
        """Return the number of a call chain, which is written before it is first used."""
        number = self._sites.get(frames)
        if number is None:
            with self._lock:
                number = self._sites.setdefault(frames, len(self._sites))
                self.event("site", number=number, frames=frames)
        return number

    def here(self, depth: int = 1) -> int:
        """Return the number of the user's call chain that led to the caller's caller; -1 when it is not known."""
        site = self.guarded(self.site, sys._getframe(depth + 1), harms=())
        return -1 if site is None else site

    def signature(self, key: tuple[object, ...], fields: Callable[[], dict[str, Any]]) -> int:
        """Return the number of a collective's signature, with ``fields`` that are written before it is first used."""
        number = self._signatures.get(key)
        if number is None:
            with self._lock:
                number = self._signatures.setdefault(key, len(self._signatures))
                self.event("signature", number=number, **fields())
        return number

    def guarded(
        self, note: Callable[..., Result], *arguments: Any, harms: Optional[tuple[str, ...]] = None
    ) -> Optional[Result]:
        """Call one of our own functions; a fault of it is noted, gives None, and never reaches the user's code.

        ``harms`` names the streams of the record that lack something then; None means that any of them may.
        """
        try:
            return note(*arguments)
        except Exception as error:
            where = getattr(note, "__name__", "probe")
            self.event(
                "probe_fault", where=where, text=repr(error), **({} if harms is None else {"harms": list(harms)})
            )
            return None

    def settle(self) -> int:
        """Mark the collectives that have completed; return the oldest row that has not, -1 when there is none."""
        with self._settling:
            while self.started:
                self._outstanding.append(self.started.popleft())
            still = []
            for row, work in self._outstanding:
                if not work.is_completed():
                    still.append((row, work))
                elif self.ring is not None:
                    self.ring.complete(row)
            self._outstanding = still
            return still[0][0] if still else -1

    def begin(self, run_directory: str, plan: dict[str, Any], rank: int) -> None:
        """Become a rank of a run: this process was forked off one that was kept warm, with hooks in place."""
        self.run_directory, self.plan, self.rank, self.pid = run_directory, plan, rank, os.getpid()
        self.writer = EventWriter(run_directory)

    def become_forked_child(self) -> None:
        """Take over in a child made by ``fork``: own event file, no ring, numbers start anew."""
        parent, rank = os.getppid(), self.rank
        self.forked_from = self.forked_from if rank is None else rank
        self.rank, self.ring = None, None
        self.started.clear()
        self._outstanding = []
        self._settling = threading.Lock()
        self._sites, self._chains, self._signatures = {}, {}, {}
        self._lock = threading.Lock()
        self.pid = os.getpid()
        if self.plan.get("kind") == "run":
            self.hold()  # A loader's workers are made anew in each epoch.
            self.writer = EventWriter(self.run_directory, lazily=True)
        else:
            self.writer.open()
        self.event("process", parent=parent, kind="fork")
