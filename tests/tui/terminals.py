"""A real terminal with a real process in it: what it writes, what it is sent, and how it ends."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

LIMIT_S = 90.0
_ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
"""Without the size that pytest-xdist names: Textual believes it, and the terminal's own no more."""
COMMANDS = re.compile(rb"\x1b(?:\[[0-9;?<>=]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][A-Z0-9]|[=>])")


class Terminal:
    """One pseudo-terminal with a process that has it as its controlling terminal."""

    def __init__(
        self,
        words: tuple[str, ...],
        environment: Mapping[str, str],
        directory: Path,
        program: tuple[str, ...] = (sys.executable, "-m"),
    ) -> None:
        self.master, slave = pty.openpty()
        self.resize(100, 30)
        self.written = b""
        self.process = subprocess.Popen(
            (*program, *words),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=directory,
            env={**_ENVIRONMENT, "TERM": "xterm-256color", "LANG": "C.UTF-8", **environment},
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def resize(self, width: int, height: int) -> None:
        """Give it another size."""
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def send(self, keys: str) -> None:
        """Type."""
        os.write(self.master, keys.encode())

    def text(self, since: int = 0) -> str:
        """What was written from a position on, without commands to the terminal."""
        return COMMANDS.sub(b"", self.written[since:]).decode("utf-8", "replace")

    def until(self, words: str, since: int = 0) -> None:
        """Wait for words on it."""
        self.until_true(lambda: words in self.text(since), words)

    def until_true(self, holds: Callable[[], bool], what: str) -> None:
        """Wait for a condition."""
        deadline = time.monotonic() + LIMIT_S
        while not holds():
            assert time.monotonic() < deadline, f"{what!r} never came: {self.text()[-3_000:]}"
            time.sleep(0.02)

    def hang_up(self) -> None:
        """Take the terminal away, as a lost connection does."""
        os.close(self.master)

    def ended(self) -> int:
        """Wait for the end of the process; its exit code."""
        code = self.process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)
        return code

    def _read(self) -> None:
        with suppress(OSError):
            while piece := os.read(self.master, 65_536):
                self.written += piece


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextmanager
def terminal(directory: Path, *words: str, environment: Mapping[str, str] | None = None) -> Iterator[Terminal]:
    """``ddpdoctor`` with some words in a terminal of 100 columns and 30 lines."""
    opened = Terminal(("ddpdoctor", *words), environment or {}, directory)
    try:
        yield opened
    finally:
        with suppress(ProcessLookupError):
            os.killpg(opened.process.pid, signal.SIGKILL)
        opened.process.wait()
        with suppress(OSError):
            os.close(opened.master)
