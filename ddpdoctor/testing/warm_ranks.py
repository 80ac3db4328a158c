"""The processes that pytest keeps warm for its tests' ranks; stdlib only: a test need not wait for more."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddpdoctor.testing import ranks

READY_WITHIN_S = 300.0
"""For importing torch, from a slow disk by many ranks at once."""
_END_WITHIN_S = 5.0
_ENDS_SOON_S = 1.0
_NOT_INHERITED = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "DDPDOCTOR_RUN", "DDPDOCTOR_RANK_PROCESS",
    "COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG", "COV_CORE_SOURCE", "COV_CORE_CONFIG", "COV_CORE_DATAFILE",
)  # fmt: skip
"""What a launcher around pytest says of itself, and what would measure the warm processes beside their ranks."""
_PREFIXES_NOT_INHERITED = ("TORCHELASTIC_", "PET_")


class RanksFailedToStart(Exception):
    """A warm process could not be started, or could not import torch; the argument says why."""


def rank_environment() -> dict[str, str]:
    """Return the environment of pytest as a rank gets it: what a launcher around pytest has set is not in it."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _NOT_INHERITED and not name.startswith(_PREFIXES_NOT_INHERITED)
    }


class WarmRank:
    """One warm process."""

    def __init__(self, output: Path, first: dict[str, Any]) -> None:
        self._output = output
        self.is_ready = False
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = rank_environment()
        environment.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
        with theirs, output.open("wb") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-u", str(Path(__file__).with_name("warm_process.py")), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # Where pytest captures nothing, what the ranks print goes where pytest's own output goes.
                stdout=sink if first["captures"] else None,
                stderr=sink if first["captures"] else None,
                env=environment,
            )
        self.control.send(json.dumps(first).encode())

    def is_alive(self) -> bool:
        """Return whether the process is there."""
        return self._process.poll() is None

    def wait_until_ready(self, deadline_s: float) -> None:
        """Wait until torch is imported; raises RanksFailedToStart."""
        if self.is_ready:
            return
        self.control.settimeout(max(0.1, deadline_s - time.monotonic()))
        try:
            content = self.control.recv(ranks.MESSAGE_BYTES)
        except TimeoutError as error:
            raise RanksFailedToStart(f"torch was not imported within {READY_WITHIN_S:g} s") from error
        except OSError:
            content = b""
        message = json.loads(content or b"{}")
        if not message.get("ready"):
            self._process.wait(_END_WITHIN_S)
            said = message.get("error") or self._output.read_text(errors="replace")[-4000:]
            raise RanksFailedToStart(f"the rank's process ended while it imported torch:\n{said}")
        self.control.settimeout(None)
        self.is_ready = True

    def ask(self, descriptors: Iterable[int] = (), **message: object) -> None:
        """Send a message, with open files; raises OSError where the process is gone."""
        socket.send_fds(self.control, [json.dumps(message).encode()], list(descriptors))

    def exit_status(self) -> int | None:
        """Return how the process ended, negative for a signal; None while it runs, though it may be about to end."""
        try:
            return self._process.wait(_ENDS_SOON_S)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """Let the process end what came of it, and then itself."""
        self.control.close()

    def wait(self) -> None:
        """Wait until it is gone, and kill it where that takes too long."""
        try:
            self._process.wait(_END_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it now; a rank that was forked off it ends with it."""
        self.control.close()
        with suppress(OSError):
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()


class WarmRanks:
    """All warm processes of one pytest, by what they serve and by the rank that they are for."""

    def __init__(self, root: Path, *, rewrite: bool, captures: bool) -> None:
        """``root`` is the user's directory; ``rewrite`` makes failing assertions show their values."""
        self.directory = Path(tempfile.mkdtemp(prefix="ddpdoctor-pytest-"))
        self._first = {"root": str(root), "rewrite": rewrite, "captures": captures, "pytest": os.getpid()}
        self._warm: dict[tuple[str, int], list[WarmRank | None]] = {}
        self._started = 0

    def of(self, device: str, nproc: int) -> list[WarmRank]:
        """Return the warm processes of ranks 0 to ``nproc`` - 1; raises RanksFailedToStart.

        Ranks of the stand-in know how many GPUs there are, and serve tests of one size; others serve all sizes.
        """
        gpus = nproc if device == "stand-in" else 0
        known = self._warm.setdefault((device, gpus), [])
        known += [None] * (nproc - len(known))
        found = []
        for rank in range(nproc):
            warm = known[rank]
            if warm is None or not warm.is_alive():
                warm = known[rank] = self._start(device, gpus)
            found.append(warm)
        deadline_s = time.monotonic() + READY_WITHIN_S
        try:
            for warm in found:
                warm.wait_until_ready(deadline_s)
        except BaseException:
            for warm in found:
                self.discard(warm)
            raise
        return found

    def discard(self, warm: WarmRank) -> None:
        """Another process takes the place of this one when it is needed next."""
        for known in self._warm.values():
            for rank, one in enumerate(known):
                if one is warm:
                    known[rank] = None
        warm.kill()

    def close(self) -> None:
        """End them all."""
        living = [warm for known in self._warm.values() for warm in known if warm is not None]
        for warm in living:
            warm.close()
        for warm in living:
            warm.wait()
        self._warm.clear()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _start(self, device: str, gpus: int) -> WarmRank:
        self._started += 1
        first = {**self._first, "device": device, "gpus": gpus, "path": sys.path, "directory": str(self.directory)}
        return WarmRank(self.directory / f"warm-{self._started}.out", first)
