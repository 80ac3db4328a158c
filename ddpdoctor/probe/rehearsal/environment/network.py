"""Python's own connections to other machines, which a rehearsal does not hold back."""

from __future__ import annotations

import sys
from typing import Any

from ...journal import Journal

ADDRESSES_NOTED = 16


def hook_network(journal: Journal) -> None:
    """Note the first connections to addresses beyond this machine."""
    noted: set[str] = set()

    def note(address: Any) -> None:
        host = str(address[0])
        if not _is_local(host) and host not in noted and len(noted) < ADDRESSES_NOTED:
            noted.add(host)
            journal.event("network", host=host)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "socket.connect" and isinstance(arguments[1], tuple) and arguments[1]:
            journal.guarded(note, arguments[1], harms=())

    sys.addaudithook(hook)


def _is_local(host: str) -> bool:
    return host in ("", "localhost", "0.0.0.0", "::", "::1") or host.startswith(("127.", "::ffff:127."))
