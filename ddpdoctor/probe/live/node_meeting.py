"""Lets the monitors of several nodes find each other: what one of them says goes through the job's own store.

The monitor beside rank 0 writes where it is to a file of its run directory; rank 0 puts that into the store, under one
key; on each other node one rank takes it out and tells its own monitor. What it holds is the monitors' business.

All of that is done by a thread of its own, on a connection of its own where torch can make one, and by calls that
return at once: nobody waits in the store. Other threads of the process never wait for it.
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
FIRST_LOOK_S = 0.25
LONGEST_PAUSE_S = 5.0
LOOKS_FOR_S = 1_800.0
"""A monitor may be attached later; one that comes later still is not told of."""
_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")


class NodeMeeting:
    """The part of one rank in it; each world begins it anew."""

    def __init__(self, journal: Journal, torch: Any) -> None:
        self._journal = journal
        self._torch = torch
        self._world = 0

    def begin(self, rank: int, world_size: int) -> None:
        """Tell which machine this is and, where there may be others, meet their monitors, in a thread."""
        self._journal.event(
            "host",
            name=os.uname().nodename,
            interfaces=_interfaces(),
            environment={name: value for name, value in sorted(os.environ.items()) if name.startswith(KEPT)},
        )
        self._world += 1
        if os.environ.get("LOCAL_WORLD_SIZE") == str(world_size) or not (rank == 0 or _is_first_here()):
            return
        name = "ddpdoctor-nodes"
        threading.Thread(target=self._meet, args=(rank, self._world), name=name, daemon=True).start()

    def _meet(self, rank: int, world: int) -> None:
        pause_s, until_s = FIRST_LOOK_S, time.monotonic() + LOOKS_FOR_S
        store: Any = None
        try:
            while time.monotonic() < until_s and world == self._world:
                store = self._store() if store is None else store
                if rank == 0 and (told := self._told_here()):
                    store.set(KEY, told)
                    return
                if rank != 0 and store.check([KEY]):
                    told = bytes(store.get(KEY))[: layout.MOST_HEAD_BYTES].decode("ascii", "replace")
                    self._journal.event("head", told=told)
                    return
                time.sleep(pause_s)
                pause_s = min(LONGEST_PAUSE_S, pause_s * 1.5)
        except Exception as error:  # The store of a job that ends goes away; nothing is lost but the meeting.
            self._journal.event("unmet", text=repr(error)[:500])

    def _store(self) -> Any:
        """The job's store, by a connection of our own where there can be one."""
        store = self._torch.distributed.distributed_c10d._get_default_store()
        try:
            return store.clone()
        except (AttributeError, NotImplementedError, RuntimeError):
            return store

    def _told_here(self) -> Optional[str]:
        """What the monitor of this node has said, once it has."""
        try:
            with open(os.path.join(self._journal.run_directory, layout.HEAD_FILE), encoding="ascii") as file:
                return file.read(layout.MOST_HEAD_BYTES).strip() or None
        except (OSError, ValueError):
            return None


def _is_first_here() -> bool:
    """Tell whether this is the first rank of its machine; where nobody says each rank counts as one."""
    named = (os.environ[name] for name in _LOCAL_RANKS if name in os.environ)
    return next(named, "0") == "0"


def _interfaces() -> list[str]:
    try:
        return [name for _, name in socket.if_nameindex()]
    except (OSError, AttributeError):
        return []
