"""Writes events from inside a training process; stdlib only, never raises into the training."""

from __future__ import annotations

import os
from array import array
from json import dumps
from os import write  # by name, as dumps: jobs replace functions of modules, to test or to trace
from typing import Any

from . import layout
from .clock import epoch_ns
from .descriptors import fits, private_descriptor

MOST_EVENT_BYTES = 1 << 28
"""No event is written once the file of a process is so large …"""
END_EVENTS = frozenset({"exit", "os_exit", "raised", "ended"})
"""… but for the few that tell how it ended."""


class EventWriter:
    """Appends events of one process, each with one ``write``; goes quiet for good when the disk does not take them."""

    def __init__(self, run_directory: str, *, lazily: bool = False) -> None:
        self._run_directory = run_directory
        self._descriptor = -1
        self._broken = False
        self.lost = 0
        """Events that could not be written; reported with the next one that can."""
        self._told = 0
        self.moved_bytes = 0
        """Bytes that were written to the file."""
        self._unopened = True
        if not lazily:
            self.open()

    def open(self) -> None:
        """Open the file of this process; called again in a forked child."""
        self._unopened = False
        path = os.path.join(self._run_directory, layout.events_name(os.getpid()))
        try:
            self._descriptor = private_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        except OSError:
            self._broken = True

    def write(self, event: str, **fields: Any) -> None:
        """Append one event; ``fields`` must be JSON values."""
        if self._unopened:
            self.open()
        if self._broken or (self.moved_bytes > MOST_EVENT_BYTES and event not in END_EVENTS):
            self.lost += 1
            return
        fields["event"] = event
        fields.setdefault("time_ns", epoch_ns())
        try:
            line = dumps(fields, separators=(",", ":"), default=str) + "\n"
            if self.lost > self._told:
                line = dumps({"event": "lost", "events": self.lost}) + "\n" + line
            content = line.encode("utf-8", "backslashreplace")
            self.moved_bytes += len(content)
            if fits(self.moved_bytes) and write(self._descriptor, content) == len(content):
                self._told = self.lost
            else:
                self.lost += 1
        except Exception:  # what a __str__ of the user's raises, too
            self.lost += 1

    def write_indices(self, number: int, indices: array[int]) -> str:
        """Write the sample indices of a pass to a file of their own; the name, or an empty string when it failed."""
        name = layout.indices_name(os.getpid(), number)
        try:
            if not fits(len(indices) * indices.itemsize):
                return ""
            with open(os.path.join(self._run_directory, name), "wb") as file:
                file.write(indices.tobytes())
        except OSError:
            return ""
        return name
