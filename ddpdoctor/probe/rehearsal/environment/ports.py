"""Gives a rendezvous port that the script names another number, the same on every rank of one rehearsal.

Two rehearsals at a time, or one beside the live job, would otherwise meet at one port: the second fails, or its ranks
join the job.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import socket
import sys
from typing import Any

from ...journal import Journal

FILE = "ports.json"
_LAUNCHER_HAS_THE_STORE = "TORCHELASTIC_USE_AGENT_STORE"


class Ports:
    """Changes where the ranks of a script that starts them itself meet; those of a launcher meet at the launcher's."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def install(self) -> None:
        """Replace the function that makes the store, for ``env://`` and ``tcp://`` alike; torch must be imported."""
        module = sys.modules.get("torch.distributed.rendezvous")
        make_store = getattr(module, "_create_c10d_store", None)
        if module is None or make_store is None:
            return

        @functools.wraps(make_store)
        def make_store_elsewhere(hostname: str, port: int, *arguments: Any, **options: Any) -> Any:
            if os.environ.get(_LAUNCHER_HAS_THE_STORE) != str(True) and port:
                port = self._journal.guarded(self._other, port) or port
            return make_store(hostname, port, *arguments, **options)

        setattr(module, "_create_c10d_store", make_store_elsewhere)  # noqa: B010 - a private name of torch

    def _other(self, port: int) -> int:
        """The port that stands for ``port`` in this rehearsal; the first rank that asks chooses it."""
        path = os.path.join(self._journal.run_directory, FILE)
        with open(path, "a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            chosen: dict[str, int] = json.loads(file.read() or "{}")
            if str(port) not in chosen:
                chosen[str(port)] = _free_port()
                file.truncate(0)
                json.dump(chosen, file)
            return int(chosen[str(port)])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
