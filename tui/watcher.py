"""Asks the source for snapshots, in a thread of its own: the only one that touches it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from textual.message import Message

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.monitor.snapshot import Playback, PlaybackState, Snapshot, SnapshotSource


class Fresh(Message):
    """The source gave a snapshot."""

    def __init__(self, snapshot: Snapshot, playback: PlaybackState | None) -> None:
        self.snapshot = snapshot
        self.playback = playback
        super().__init__()


class Failed(Message):
    """The source could not give one, or not do what was asked."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__()


class Watcher:
    """Passes on what the source says, one message at a time, and to the source what the user asks of it."""

    def __init__(
        self, source: SnapshotSource, playback: Playback | None, refresh_s: float, post: Callable[[Message], object]
    ) -> None:
        self._source = source
        self._playback = playback
        self._refresh_s = refresh_s
        self._post = post
        # Not a SimpleQueue: Python 3.11, stopped in its `get` and continued after the time, waits in it for ever, as
        # the time that is left is negative then, which means no limit.
        self._requests: queue.Queue[Callable[[], None]] = queue.Queue()
        self._taken = threading.Event()
        self._ends = threading.Event()

    def start(self) -> None:
        """Begin to ask."""
        threading.Thread(target=self._run, name="ddpdoctor-screen", daemon=True).start()

    def stop(self) -> None:
        """Ask no more."""
        self._ends.set()
        self._taken.set()

    def taken(self) -> None:
        """The last message was dealt with: the next one may come."""
        self._taken.set()

    def request(self, do: Callable[[], None]) -> None:
        """Have something done to the source, and the next snapshot taken at once."""
        self._requests.put(do)

    def _run(self) -> None:
        while not self._ends.is_set():
            began_s = time.monotonic()
            self._taken.clear()
            self._post(self._look())
            self._taken.wait()
            left_s = self._refresh_s - (time.monotonic() - began_s)
            try:
                self._requests.get(timeout=max(0.05, left_s))()
            except queue.Empty:
                continue
            except Exception as error:
                self._post(Failed(_error_text(error)))

    def _look(self) -> Message:
        try:
            state = self._playback.playback() if self._playback is not None else None
            return Fresh(self._source.snapshot(), state)
        except Exception as error:
            return Failed(_error_text(error))


def _error_text(error: Exception) -> str:
    return error.message if isinstance(error, DdpDoctorError) else f"{type(error).__name__}: {error}"
