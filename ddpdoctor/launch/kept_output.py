"""Keeps what a job prints in a file, by a small process between the two.

A job that wrote to the file itself would meet a full disk, or a limit on the size of files, as an error of its own
prints. The process reads until the job and all that it has started are gone, also when the monitor is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

_PIECE_BYTES = 1 << 16
_ENDS_WITHIN_S = 1.0
"""After the launcher has ended its last lines are written in so long, unless a process that it has left prints on."""
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGXFSZ)


class KeptOutput:
    """The file, and the pipe that leads to it."""

    def __init__(self, path: Path) -> None:
        """Start the process; raises OSError where that cannot be."""
        reading, self.pipe = os.pipe()
        """Where the job shall write; closed here by ``close`` once it has it."""
        try:
            # By its path and without site-packages: it starts in 15 ms.
            words = (sys.executable, "-I", "-S", os.path.abspath(__file__), os.path.abspath(path))
            null = subprocess.DEVNULL
            self._process = subprocess.Popen(words, stdin=reading, stdout=null, stderr=null, start_new_session=True)
        except OSError:
            os.close(self.pipe)
            raise
        finally:
            os.close(reading)

    def close(self) -> None:
        """Leave the pipe to the job."""
        os.close(self.pipe)

    def is_whole(self) -> bool:
        """Return whether the file holds all that was printed, as far as that is known after a second."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(_ENDS_WITHIN_S) == 0
        return True


def keep(path: str) -> int:
    """Write stdin to a file; 1 when something of it was lost, which the job does not notice."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    lost = False
    try:
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    except OSError:
        target, lost = os.open(os.devnull, os.O_WRONLY), True
    while piece := os.read(0, _PIECE_BYTES):
        try:
            while piece:
                piece = piece[os.write(target, piece) :]
        except OSError:
            lost = True
    return int(lost)


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1]))
