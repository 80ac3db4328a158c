"""Reads a core file of a rank with pystack, an optional dependency: the signal that ended it, and its Python stack."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from itertools import count
from pathlib import Path

from ddpdoctor.finding import Frame
from ddpdoctor.postmortem.inputs import Found
from ddpdoctor.postmortem.launchers import signal_number
from ddpdoctor.postmortem.log_reader import LogRead
from ddpdoctor.record.streams.setup import Incident

PATIENCE_S = 120
_THREAD = re.compile(r"^Traceback for thread (?P<thread>\d+)(?P<marks>.*)\(most recent call last\):$", re.MULTILINE)
_FRAME = re.compile(r'^\s*\(Python\) File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)', re.MULTILINE)
_PID = re.compile(r"^pid: (?P<pid>\d+)", re.MULTILINE)
_SIGNAL = re.compile(r"The process died due receiving signal SIG(?P<name>\w+)")


def read_core(found: Found, positions: count[int]) -> LogRead:
    """Return the death that a core file shows; raises OSError with a sentence where it cannot be read."""
    assert found.path is not None
    text = _by_pystack(found.path)
    stacks = _THREAD.split(text)
    threads = list(zip(stacks[1::3], stacks[2::3], stacks[3::3], strict=True))
    pid = _PID.search(text)
    if not threads:
        raise OSError("pystack finds no stack of Python in it")
    own = [stack for thread, _, stack in threads if pid is not None and thread == pid["pid"]]
    held = [stack for _, marks, stack in threads if "Has the GIL" in marks]
    frames = [
        Frame(one["file"], int(one["line"]), one["function"]) for one in _FRAME.finditer((held or own or [""])[0])
    ]
    died = _SIGNAL.search(text)
    incident = Incident(
        kind="signalled",
        trouble="killed",
        type="core file",
        signal=signal_number(died["name"]) if died else None,
        pid=int(pid["pid"]) if pid else 0,
        rank=found.rank,
        host=found.host,
        position=next(positions),
        file=found.name,
        message=died[0] if died else "the process wrote a core file",
        frames=tuple(reversed(frames)),
    )
    return LogRead(incidents=[incident], ranks=set() if found.rank is None else {found.rank})


def _by_pystack(path: Path) -> str:
    beside = Path(sys.executable).with_name("pystack")
    program = str(beside) if beside.exists() else shutil.which("pystack")
    if program is None:
        raise OSError("it is a core file, which pystack reads: `pip install 'ddpdoctor[cores]'`")
    command = (program, "--no-color", "core", str(path.absolute()))
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_S, check=False, text=True
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"pystack took longer than {PATIENCE_S} s") from error
    if done.returncode:
        said = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise OSError(f"pystack cannot read this core file ({said[-1][:200] if said else 'it says nothing'})")
    return done.stdout
