"""Asks the ranks for their threads' stacks, and takes what ``faulthandler`` gives where a rank cannot answer."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

import msgspec

from ddpdoctor.diagnosis.stacks import WORKER, is_at_work, is_worker
from ddpdoctor.errors import DdpDoctorError, UsageError
from ddpdoctor.files.untrusted import read_start
from ddpdoctor.finding import Frame
from ddpdoctor.launch.pid_namespaces import OuterPids, thread_outside
from ddpdoctor.launch.processes import children_of, handles
from ddpdoctor.record import layout
from ddpdoctor.record.ring_reader import RingTail
from ddpdoctor.record.streams.setup import StackDump
from ddpdoctor.record.writer import epoch_ns

_OURS = str(Path(__file__).resolve().parents[2]) + os.sep
_ANSWER_WITHIN_S = 0.6
_SIGNAL_WITHIN_S = 0.4
_STILL_NS = 2_000_000_000
"""A heart that has not beaten for so long will not answer either: it beats five times a second at least."""
ASK_AGAIN_NS = 10_000_000_000
_MOST_BYTES = 1 << 18
_THREAD = re.compile(r"^(Current thread|Thread) (0x[0-9a-f]+)")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')


def ask_for_stacks(rings: Mapping[int, RingTail], number: int) -> tuple[int, ...]:
    """Ask every living rank for its stacks and wait until they are written; the processes that did not answer.

    A rank whose heart has stopped is asked too, and not waited for.
    """
    for ring in rings.values():
        ring.ask_for_stacks(number)
    deadline = time.monotonic() + _ANSWER_WITHIN_S
    silent = list(rings)
    while any(_beats(rings[pid]) for pid in silent) and time.monotonic() < deadline:
        time.sleep(0.02)
        silent = [pid for pid in silent if rings[pid].heartbeat().answered < number]
    return tuple(silent)


def _beats(ring: RingTail) -> bool:
    return epoch_ns() - ring.heartbeat().beat_at_ns < _STILL_NS


def signal_for_stacks(
    directory: Path, ranks: Mapping[int, int], outer_pid: Callable[[int], int | None] = lambda pid: pid
) -> list[StackDump]:
    """Stacks of processes (given with their rank) whose interpreter is held, written by their signal handler.

    ``outer_pid`` gives the number out here of a process that knows itself by another one.
    """
    asked: dict[int, int] = {}
    for pid, rank in ranks.items():
        outer = outer_pid(pid)
        try:
            # Without the file there is no handler of ours, and without any the signal would kill the process.
            licensed = outer is not None and (directory / layout.STACKS_FILE.format(pid)).exists()
            if outer is not None and licensed and handles(outer, signal.SIGUSR2):
                os.kill(outer, signal.SIGUSR2)
                asked[pid] = rank
        except OSError:
            continue
    if asked:
        time.sleep(_SIGNAL_WITHIN_S)
    dumps = []
    for pid, rank in asked.items():
        try:
            content = read_start(directory / layout.STACKS_FILE.format(pid), _MOST_BYTES, directory)
        except OSError:
            continue
        dumps += parse_faulthandler(content.decode(errors="replace"), rank)
    return dumps


class SignalledStacks:
    """Has the stacks of ranks written whose interpreter is held, one look after another.

    The signal goes to the thread of ours: what the training thread does is not interrupted.
    """

    def __init__(self, directory: Path, outer: OuterPids | None = None) -> None:
        self._directory = directory
        self._outer = OuterPids(directory) if outer is None else outer
        self._asked: dict[int, tuple[int, int]] = {}
        """By process how long its file was when it was asked, and when that was."""
        self._taken: dict[int, tuple[StackDump, ...]] = {}

    def ask(self, pid: int, thread: int, now_ns: int) -> None:
        """Ask a process whose thread of ours is ``thread``, unless it was asked a moment ago."""
        if now_ns - self._asked.get(pid, (0, 0))[1] < ASK_AGAIN_NS:
            return
        try:
            # Without the file there is no handler of ours, and without any the signal would kill the process.
            size = (self._directory / layout.STACKS_FILE.format(pid)).stat().st_size
            self._asked[pid] = size, now_ns
            outer = self._outer(pid)
            if thread and outer is not None and handles(outer, signal.SIGUSR2):
                number = thread_outside(outer, thread)
                if number is not None:
                    _signal_thread(outer, number)
        except (OSError, AttributeError):
            self._asked[pid] = 0, now_ns

    def written(self, pid: int) -> int:
        """Bytes that a process has written for us."""
        try:
            return (self._directory / layout.STACKS_FILE.format(pid)).stat().st_size if pid in self._asked else 0
        except OSError:
            return 0

    def take(self, pid: int, rank: int) -> tuple[StackDump, ...]:
        """Return what a process wrote when it was asked last."""
        if pid in self._asked:
            size, asked_ns = self._asked[pid]
            try:
                path = self._directory / layout.STACKS_FILE.format(pid)
                text = read_start(path, _MOST_BYTES, self._directory, size).decode(errors="replace")
            except OSError:
                text = ""
            dumps = parse_faulthandler(text, rank)
            if dumps:
                self._taken[pid] = tuple(msgspec.structs.replace(dump, time_ns=asked_ns) for dump in dumps)
        return self._taken.get(pid, ())


def _signal_thread(pid: int, thread: int) -> None:
    """Send SIGUSR2 to one thread of a process; raises AttributeError where the C library cannot."""
    import ctypes

    if ctypes.CDLL(None, use_errno=True).tgkill(pid, thread, int(signal.SIGUSR2)):
        raise OSError(ctypes.get_errno(), "tgkill")


def parse_faulthandler(text: str, rank: int) -> list[StackDump]:
    """Return the stacks in what ``faulthandler`` wrote; the last thread it lists is the main thread."""
    threads: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if head := _THREAD.match(line):
            threads.append((head[2], []))
        elif threads and (frame := _FRAME.match(line)):
            threads[-1][1].append(Frame(frame["file"], int(frame["line"]), frame["function"]))
    return [
        StackDump(rank=rank, thread=name, main=index == len(threads) - 1, frames=tuple(frames), time_ns=epoch_ns())
        for index, (name, frames) in enumerate(threads)
    ]


def with_training_thread(stacks: Iterable[StackDump], thread: int) -> list[StackDump]:
    """Return the stacks of which the one of the thread that trains counts as the main one; 0 for the main thread."""
    if not thread:
        return list(stacks)
    name = f"0x{thread:016x}"
    return [msgspec.structs.replace(stack, main=stack.thread == name) for stack in stacks]


def users_stacks(stacks: Iterable[StackDump]) -> tuple[StackDump, ...]:
    """Return the stacks without our own lines and threads."""
    kept = []
    for stack in stacks:
        # What a thread was started with; ours also stand inside of the user's calls.
        first = next((frame for frame in reversed(stack.frames) if not frame.file.endswith("threading.py")), None)
        if stack.main or first is None or not first.file.startswith(_OURS):
            frames = tuple(frame for frame in stack.frames if not frame.file.startswith(_OURS))
            kept.append(msgspec.structs.replace(stack, frames=frames))
    return tuple(kept)


# Takes the stacks of running processes with py-spy, an optional dependency, which reads their memory only.

# Takes the stack of a rank on Python 3.14 or newer with what its own interpreter brings, where py-spy is not there.

UNWINDER_PATIENCE_S = 10.0
NO_UNWINDER = 4
"""Exit code of an interpreter that has none: before 3.14, or built without it."""
PROGRAM = """
import json, sys
try:
    from _remote_debugging import RemoteUnwinder
except ImportError:
    sys.exit(4)
seen = RemoteUnwinder(int(sys.argv[1]), all_threads=True).get_stack_trace()
threads = [thread for one in seen for thread in getattr(one, "threads", [one])]
def line_of(frame):
    line = getattr(frame, "lineno", None)
    return line if line is not None else getattr(getattr(frame, "location", None), "lineno", 0)
print(json.dumps([{
    "os_thread_id": thread.thread_id,
    "frames": [{"name": f.funcname, "filename": f.filename, "line": line_of(f)} for f in thread.frame_info],
} for thread in threads]))
"""


def read_stack(pid: int) -> tuple[bytes, str]:
    """Return the stacks of a process in py-spy's JSON; where there are none, an empty one and why, as a clause."""
    try:
        interpreter = os.readlink(f"/proc/{pid}/exe")
        done = subprocess.run(
            (interpreter, "-I", "-S", "-c", PROGRAM, str(pid)),
            capture_output=True,
            timeout=UNWINDER_PATIENCE_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return b"", "its interpreter did not answer"
    except OSError as error:
        return b"", f"its interpreter cannot be started: {error.strerror or error}"
    if done.returncode == NO_UNWINDER:
        return b"", "py-spy is not installed, and only Python 3.14 or newer works without it"
    if done.returncode:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        return b"", last[0][:160] if last else "its interpreter could not read it"
    return done.stdout, ""


PATIENCE_S = 10.0
"""One stack takes 0.1 to 0.5 s."""
BETWEEN_S = 1.0
"""Between the two looks that tell a process that stands from one that moves."""
IDLE_SHARE = 0.05
"""A process that waits in gloo used 0.0 to 0.7% of a core; one that computes, 50% and more."""


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What one process did."""

    frames: tuple[Frame, ...] = ()
    """Of its main thread, innermost first; empty where it could not be read."""
    moved: bool = False
    """Its stack changed between two looks, or it used more of a core than one that waits."""
    native: tuple[str, ...] = ()
    """C++ functions that its main thread is in, innermost first; empty where no one asked for them."""
    problem: str = ""
    """Why it could not be read, as a clause."""
    native_problem: str = ""
    """Why its C++ functions could not be read, where someone asked."""


class _Frame(msgspec.Struct):
    name: str = ""
    filename: str = ""
    line: int = 0
    module: str | None = None

    @property
    def is_native(self) -> bool:
        """It stands in a library or an executable, not in Python code."""
        return self.module is not None and self.module == self.filename and not self.filename.endswith(".py")


class _Thread(msgspec.Struct):
    pid: int = 0
    os_thread_id: int | None = None
    thread_name: str | None = None
    frames: list[_Frame] = []


def find_py_spy() -> str | None:
    """Return the program; None where it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


_MISSING = "stacks of running processes are taken with py-spy, which is not installed"
_INSTALL = "`pip install 'ddpdoctor[live]'`, or `pip install py-spy`; ranks on Python 3.14 or newer do not need it."


def look_at(pids: Sequence[int], directories: Sequence[str], *, native: bool = False) -> list[Look]:
    """Look twice at each process, all of them at once; ``directories`` are their working directories.

    ``native`` takes C++ functions as well, of one process of each set of equal stacks: py-spy stops a process for that,
    0.4 to 0.6 s of its own CPU time each. Raises UsageError where py-spy is needed and not installed.
    """
    program = find_py_spy()
    if program is None and native:
        raise UsageError(_MISSING, _INSTALL)
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
                problem=problem,
            )
        )
    if program is None and looks and all(look.problem for look in looks):
        raise UsageError(_MISSING, _INSTALL)
    return _with_native(program, pids, looks) if native and program is not None else looks


MOST_WORKERS, WORKERS_SHOWN = 64, 4
"""Of one rank: how many are looked at, and how many are told of."""


class LoaderWorker(msgspec.Struct, frozen=True):
    """A worker of a DataLoader that a rank waits for."""

    pid: int
    look: Look

    def dump(self, rank: int, now_ns: int) -> StackDump:
        """Return its stack as one of its rank's."""
        return StackDump(rank=rank, thread=f"{WORKER}{self.pid}", main=False, frames=self.look.frames, time_ns=now_ns)


def workers_of(pid: int, directory: str) -> tuple[LoaderWorker, ...]:
    """Look at the workers of a rank's loaders; those at work come first, and are all that is shown if there is one.

    Raises UsageError where py-spy is needed and not installed.
    """
    pids = children_of(pid)[:MOST_WORKERS]
    looks = look_at(pids, [directory] * len(pids)) if pids else []
    seen = [LoaderWorker(pid, look) for pid, look in zip(pids, looks, strict=True) if is_worker(look.frames)]
    return tuple([one for one in seen if is_at_work(one.look.frames)] or seen)[:WORKERS_SHOWN]


class AwaitedWorkers:
    """Where the workers are that stuck ranks wait for: a thread looks now and again, so that nothing waits for it."""

    def __init__(self, outer: OuterPids) -> None:
        self._outer = outer
        self._dumps: tuple[StackDump, ...] = ()
        self._asked_ns = -ASK_AGAIN_NS
        self._looking: threading.Thread | None = None

    def of(self, ranks: Mapping[int, int], now_ns: int) -> tuple[StackDump, ...]:
        """Return the stacks as they were seen last, for ``ranks`` with their processes; have them looked at again."""
        if not ranks:
            self._dumps = ()
            return ()
        if now_ns - self._asked_ns >= ASK_AGAIN_NS and (self._looking is None or not self._looking.is_alive()):
            self._asked_ns = now_ns
            self._looking = threading.Thread(
                target=self._look, args=(dict(ranks),), name="ddpdoctor-workers", daemon=True
            )
            self._looking.start()
        return tuple(dump for dump in self._dumps if dump.rank in ranks)

    def _look(self, ranks: Mapping[int, int]) -> None:
        found: list[StackDump] = []
        for rank, pid in ranks.items():
            outer = self._outer(pid)
            # Without py-spy the rank's own stack still says that it waits for a worker.
            with suppress(DdpDoctorError, OSError):
                found += [one.dump(rank, epoch_ns()) for one in workers_of(outer, "")] if outer is not None else []
        self._dumps = tuple(found)


def _with_native(program: str, pids: Sequence[int], looks: list[Look]) -> list[Look]:
    """Add the C++ functions to the first look of each set of equal stacks: the others would say the same."""
    asked = {look.frames: number for number, look in reversed(list(enumerate(looks))) if look.frames}
    for number in sorted(asked.values()):
        main, problem = _main_thread(program, pids[number], "--native")
        names = tuple(frame.name for frame in takewhile(lambda frame: frame.is_native, main.frames))
        looks[number] = msgspec.structs.replace(looks[number], native=names, native_problem=problem)
    return looks


def _stack(program: str | None, pid: int) -> tuple[tuple[Frame, ...], str]:
    """Return the main thread's frames, and why there are none."""
    main, problem = _main_thread(program, pid, "--nonblocking")
    return tuple(Frame(frame.filename, frame.line, frame.name) for frame in main.frames), problem


def _main_thread(program: str | None, pid: int, option: str) -> tuple[_Thread, str]:
    said, problem = read_stack(pid) if program is None else _ask(program, pid, option)
    if problem:
        return _Thread(), problem
    try:
        threads = msgspec.json.decode(said, type=list[_Thread])
    except msgspec.DecodeError as error:
        return _Thread(), f"what was read is not a stack: {error}"
    return next((one for one in threads if one.os_thread_id == pid), threads[0] if threads else _Thread()), ""


def _ask(program: str, pid: int, option: str) -> tuple[bytes, str]:
    """Return what py-spy says of a process, and why it says nothing."""
    command = (program, "dump", "--pid", str(pid), "--json", option)
    try:
        done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return b"", "py-spy did not answer"
    except OSError as error:
        return b"", f"py-spy cannot be started: {error.strerror or error}"
    return (b"", _refusal(done.stderr.decode("utf-8", "replace"))) if done.returncode else (done.stdout, "")


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
