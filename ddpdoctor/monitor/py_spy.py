"""Takes the stacks of running processes with py-spy, an optional dependency, which reads their memory only."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from ddpdoctor.errors import UsageError
from ddpdoctor.finding import Frame

PATIENCE_S = 10.0
"""One stack takes 0.1 to 0.5 s."""
BETWEEN_S = 1.0
"""Between the two looks that tell a process that stands from one that moves."""
IDLE_SHARE = 0.05
"""A process that waits in gloo used 0.0 to 0.7 % of a core; one that computes, 50 % and more."""


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What one process did."""

    frames: tuple[Frame, ...] = ()
    """Of its main thread, innermost first; empty where it could not be read."""
    moved: bool = False
    """Its stack changed between two looks, or it used more of a core than one that waits."""
    cpu_share: float = 0.0
    """Of one core."""
    problem: str = ""
    """Why it could not be read, as a clause."""


class _Frame(msgspec.Struct):
    name: str = ""
    filename: str = ""
    line: int = 0


class _Thread(msgspec.Struct):
    pid: int = 0
    os_thread_id: int | None = None
    thread_name: str | None = None
    frames: list[_Frame] = []


def find_py_spy() -> str:
    """The program; raises UsageError where it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    found = str(beside) if beside.exists() else shutil.which("py-spy")
    if found is None:
        raise UsageError("stacks of running processes are taken with py-spy, which is not installed", _INSTALL)
    return found


_INSTALL = "`pip install 'ddpdoctor[live]'`, or `pip install py-spy`."


def look_at(pids: Sequence[int], directories: Sequence[str]) -> list[Look]:
    """Look twice at each process, all of them at once; ``directories`` are their working directories."""
    program = find_py_spy()
    with ThreadPoolExecutor(max_workers=min(32, 4 * (os.cpu_count() or 1))) as pool:
        before = [_cpu_s(pid) for pid in pids]
        started = time.monotonic()
        first = list(pool.map(lambda pid: _stack(program, pid), pids))
        time.sleep(max(0.0, BETWEEN_S - (time.monotonic() - started)))
        second = list(pool.map(lambda pid: _stack(program, pid), pids))
        after, elapsed = [_cpu_s(pid) for pid in pids], time.monotonic() - started
    looks = []
    for number, directory in enumerate(directories):
        (frames, problem), (again, _) = second[number], first[number]
        share = max(0.0, after[number] - before[number]) / elapsed
        looks.append(
            Look(
                frames=tuple(_absolute(frame, directory) for frame in frames),
                moved=bool(again) and bool(frames) and (again != frames or share > IDLE_SHARE),
                cpu_share=share,
                problem=problem,
            )
        )
    return looks


def _stack(program: str, pid: int) -> tuple[tuple[Frame, ...], str]:
    """The main thread's frames, and why there are none."""
    command = (program, "dump", "--pid", str(pid), "--json", "--nonblocking")
    try:
        done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return (), "py-spy did not answer"
    except OSError as error:
        return (), f"py-spy cannot be started: {error.strerror or error}"
    if done.returncode:
        return (), _refusal(done.stderr.decode("utf-8", "replace"))
    try:
        threads = msgspec.json.decode(done.stdout, type=list[_Thread])
    except msgspec.DecodeError as error:
        return (), f"py-spy said something else than stacks: {error}"
    main = next((thread for thread in threads if thread.os_thread_id == pid), threads[0] if threads else _Thread())
    return tuple(Frame(frame.filename, frame.line, frame.name) for frame in main.frames), ""


def _refusal(text: str) -> str:
    if "ermission denied" in text or "not permitted" in text or "EPERM" in text:
        return (
            "the kernel refuses: run this as root, with --cap-add SYS_PTRACE in a container, or after "
            "`sysctl kernel.yama.ptrace_scope=0`"
        )
    return text.strip().splitlines()[-1][:160] if text.strip() else "py-spy failed"


def _absolute(frame: Frame, directory: str) -> Frame:
    """A script that was named by a relative path is in the working directory of its process."""
    if frame.file.startswith(("/", "<")) or not directory:
        return frame
    return msgspec.structs.replace(frame, file=os.path.normpath(os.path.join(directory, frame.file)))


def _cpu_s(pid: int) -> float:
    import psutil

    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
