"""The meeting of the monitors of several nodes: they exchange one address through the job's own store.

The monitor beside rank 0 writes where it is to a file of its run directory; rank 0 puts that into the store, under one
key. A monitor whose ranks lack rank 0 names one of them in a file, and that rank takes it out and passes it to its
monitor. What it holds is the monitors' business.

Where no monitor has written such a file, which none does on the only node of a job, the store is left alone. Else a
thread of its own uses it for one call that returns at once, by a connection of its own where torch can make one, and
keeps no reference to it in between: a store that lives on keeps its port, and a new process group there would read the
keys of the old one. It ends before the world does.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Any, Optional

from ...record import layout
from ..journal import Journal
from ..plan import KEPT

KEY = "ddpdoctor/head"
LOOK_EVERY_S = 0.5
"""How often the files of the monitor of this node are looked for."""
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 10.0
"""Between two looks into the store."""
PATIENCE_S = 1.0
"""The end of a world waits no longer for a call to its store, which takes a millisecond."""


class NodeMeeting:
    """The part of one rank in it; each world begins it anew."""

    def __init__(self, journal: Journal, torch: Any) -> None:
        self._journal = journal
        self._torch = torch
        self._rank: Optional[int] = None
        """In the world that still has to be met; None where there is none."""
        self._over = threading.Event()
        """Of the world that is there now."""
        self._thread: Optional[threading.Thread] = None
        self._looks_at_s = 0.0
        self._seen: Optional[tuple[str, int, int]] = None
        """Which of the files was read last, and its identity."""
        self._read = ""
        """What was in it."""

    def begin(self, rank: int, world_size: int) -> None:
        """Write which machine this is; where there are others, their monitors are met once ours requests it."""
        self._journal.event(
            "host",
            name=os.uname().nodename,
            interfaces=_interfaces(),
            environment={name: value for name, value in sorted(os.environ.items()) if name.startswith(KEPT)},
            cores=sorted(os.sched_getaffinity(0)),
        )
        self.end()
        self._over = threading.Event()
        self._rank = rank if world_size > 1 else None

    def look(self) -> None:
        """Look, again and again, whether the monitor of this node has something for the others, or waits for something.

        From then on a thread deals with the store.
        """
        rank, over, now_s = self._rank, self._over, time.monotonic()
        if rank is None or now_s < self._looks_at_s:
            return
        self._looks_at_s = now_s + LOOK_EVERY_S
        message = self._written(layout.HEAD_FILE if rank == 0 else layout.SEEK_FILE)
        if not message or (rank != 0 and message != str(rank)):
            return
        self._rank = None
        self._thread = threading.Thread(
            target=self._meet, args=(message if rank == 0 else "", over), name="ddpdoctor-nodes", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Stop before the world, or the process, ends: nothing of ours holds its store, nor runs, from here on."""
        self._rank = None
        self._over.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(PATIENCE_S)

    def _meet(self, message: str, over: threading.Event) -> None:
        pause_s = FIRST_PAUSE_S
        try:
            while not over.is_set() and not self._exchanged(message):
                over.wait(pause_s)
                pause_s = min(LONGEST_PAUSE_S, pause_s * 1.5)
        except Exception:  # The store of a job that ends goes away; nothing is lost but the meeting.
            return

    def _exchanged(self, message: str) -> bool:
        """Put the message for the others into the store, or take theirs out; return whether it is done."""
        store = self._store()
        if message:
            store.set(KEY, message)
            return True
        if not store.check([KEY]):
            return False
        found = bytes(store.get(KEY))[: layout.MOST_HEAD_BYTES].decode("ascii", "replace")
        self._journal.event("head", told=found)
        return True

    def _store(self) -> Any:
        """Return the job's store, by a connection of our own where there can be one."""
        store = self._torch.distributed.distributed_c10d._get_default_store()
        try:
            return store.clone()
        except (AttributeError, NotImplementedError, RuntimeError):
            return store

    def _written(self, name: str) -> str:
        """Return what the monitor of this node has written to a file; empty while there is none.

        It is read once: a rank that reads again and again is taken for one that works, and so never stands still.
        """
        path = os.path.join(self._journal.run_directory, name)
        try:
            status = os.stat(path)
            seen = (name, status.st_ino, status.st_mtime_ns)
            if seen != self._seen:
                with open(path, encoding="ascii") as file:
                    self._read = file.read(layout.MOST_HEAD_BYTES).strip()
                self._seen = seen
            return self._read
        except (OSError, ValueError):
            return ""


def _interfaces() -> list[str]:
    try:
        return [name for _, name in socket.if_nameindex()]
    except (OSError, AttributeError):
        return []
