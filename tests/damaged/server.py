"""Runs the command on one case after the other, each in a fork of a process that has imported everything already.

Started as ``python -m tests.damaged.server RUN``: each line of its input is a ``Task``, each line of its output an
``Ending``. A case has limits of memory, of processor time and of time, and no privilege to read what is not its own.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import msgspec

MOST_BYTES = 1 << 30
"""Of address space, which is more than the memory in use."""
MOST_WRITTEN = 64 << 20
HUNG_S = 60.0
"""A case that takes longer is ended: on a loaded machine ten seconds may become so many."""
_READ_ALL = 1 << 1 | 1 << 2
"""The capabilities by which root reads files without permission."""


class Task(msgspec.Struct, frozen=True):
    """One command line."""

    arguments: tuple[str, ...]
    directory: str
    """Where it runs, and where what it says is written to."""
    grows: str = ""
    """A file that another program appends to meanwhile."""


class Ending(msgspec.Struct, frozen=True):
    """What became of it."""

    code: int
    """Negative for a signal."""
    seconds: float
    processor_s: float
    peak_bytes: int


def serve(warm_up: str) -> None:
    """Load what the commands need, then answer until the input ends."""
    from ddpdoctor.cli.main import main

    answers = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        os.dup2(null, descriptor)
    for arguments in (["report", warm_up], ["autopsy", warm_up], ["what-if", warm_up], ["compare", warm_up, warm_up]):
        main(arguments)
    gc.collect()
    gc.freeze()
    for line in sys.stdin.buffer:
        task = msgspec.json.decode(line, type=Task)
        os.write(answers, msgspec.json.encode(_ended(task)) + b"\n")


def _ended(task: Task) -> Ending:
    began_s = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _run(task)
    while True:
        ended, status, used = os.wait4(pid, os.WNOHANG)
        if ended:
            break
        if time.monotonic() - began_s > HUNG_S:
            os.killpg(pid, signal.SIGKILL)
        if task.grows:
            with suppress(OSError), open(task.grows, "ab") as file:
                file.write(b'{"event":"gauge","time_ns":1}\n' * 2_000)
        time.sleep(0.003)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return Ending(
        code=os.waitstatus_to_exitcode(status),
        seconds=time.monotonic() - began_s,
        processor_s=used.ru_utime + used.ru_stime,
        peak_bytes=used.ru_maxrss << 10,
    )


def _run(task: Task) -> None:
    """Become the command; does not return."""
    code = 99
    try:
        os.setsid()
        os.chdir(task.directory)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(f"../{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
        os.environ.update(environment_of(Path(task.directory)))
        for limit, value in (
            (resource.RLIMIT_AS, MOST_BYTES),
            (resource.RLIMIT_FSIZE, MOST_WRITTEN),
            (resource.RLIMIT_CPU, int(HUNG_S)),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(limit, (value, value))
        without_privilege()
        from ddpdoctor.cli.main import main

        code = main(list(task.arguments))
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def environment_of(directory: Path) -> dict[str, str]:
    """The variables that keep a case's own state beside it."""
    scratch = directory.parent
    return {
        "HOME": str(scratch / "home"),
        "XDG_STATE_HOME": str(scratch / "home" / "state"),
        "TMPDIR": str(scratch / "tmp"),
        "COLUMNS": "80",
    }


def without_privilege() -> None:
    """Take away what lets root read a file that its mode does not let it read."""
    if os.geteuid():
        return
    libc = ctypes.CDLL(None, use_errno=True)
    head = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()
    if libc.capget(head, sets) == 0:
        for number in range(3):
            sets[number] &= ~_READ_ALL
        libc.capset(head, sets)


class Server:
    """The process of ``serve``, seen from outside."""

    def __init__(self, warm_up: Path, root: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("GITHUB_", "DDPD"))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.damaged.server", str(warm_up)],
            cwd=root,
            env={**environment, "PYTHONPATH": str(root), "MALLOC_ARENA_MAX": "2"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(self, task: Task) -> Ending:
        """Run one case; raises RuntimeError where the server itself has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(task) + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the server of the cases has ended")
        return msgspec.json.decode(line, type=Ending)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()


if __name__ == "__main__":
    serve(sys.argv[1])
