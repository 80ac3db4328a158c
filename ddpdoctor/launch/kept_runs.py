"""The directories of watched runs: made before the job starts, kept afterwards, and thrown away when there are many."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

import msgspec

from ddpdoctor.errors import ConfigurationError, RecordError, UsageError
from ddpdoctor.files import regex
from ddpdoctor.files.patterns import home_directory
from ddpdoctor.files.untrusted import read_untrusted
from ddpdoctor.launch.box.start import remove_layers
from ddpdoctor.launch.pid_namespaces import OuterPids, is_alive, is_of_run
from ddpdoctor.record import layout
from ddpdoctor.record.reader import read_plan
from ddpdoctor.record.ring_reader import RingTail
from ddpdoctor.record.writer import epoch_ns, kept_clock, kept_elsewhere, share_clock

# Finds the watched jobs that run on this machine: by the environment of this user's processes.


def find_run(named: str | None) -> tuple[Path, tuple[Path, ...]]:
    """Return the run to attach to, and the other live runs of this user, newest first.

    Raises UsageError when none runs, and RecordError when the named one cannot be read.
    """
    if named is not None:
        directory = Path(named).absolute()
        plan = read_plan(directory)
        if host := kept_elsewhere(plan.clock):
            listens = (directory / layout.ATTACH_FILE).is_file()
            watch = f"`ddpdoctor profile --attach {named}` asks its monitor" if listens else f"Watch it on {host}"
            raise UsageError(
                f"the run in {named} was started on {host}, and cannot be watched from here",
                f"{watch}, if it goes on; `ddpdoctor report {named}` shows what was recorded.",
            )
        share_clock(plan.clock)
        if not live_processes(directory) and not belongs(plan.launcher_pid or 0, directory):
            raise UsageError(f"the run in {named} is over", f"`ddpdoctor report {named}` shows what was recorded.")
        return directory, ()
    runs = live_runs()
    if not runs:
        raise UsageError(
            "none of your watched jobs runs on this machine",
            "Start one with `ddpdoctor profile train.py`; for other launchers `ddpdoctor profile --env` prints two "
            "variables that they must pass on.",
        )
    return runs[0], tuple(runs[1:])


def live_runs() -> list[Path]:
    """Run directories that a living process of this user writes to, newest first."""
    import psutil

    named: set[str] = set()
    for process in psutil.process_iter():
        try:
            if process.uids().real == os.getuid():
                named.add(process.environ().get(layout.RUN_VARIABLE, ""))
        except (psutil.Error, OSError):
            continue
    return sorted((Path(name) for name in named - {""} if _is_live(Path(name))), key=_born, reverse=True)


def _is_live(directory: Path) -> bool:
    try:
        return read_plan(directory).kind == "run" and bool(live_processes(directory))
    except RecordError:
        return False


def _born(directory: Path) -> float:
    try:
        return (directory / layout.JOB_FILE).stat().st_mtime
    except OSError:
        return 0.0


MOST_RUNS = 50
MOST_BYTES = 2_000_000_000
"""The newest runs are kept as long as there are no more, and they hold no more; one that is live is never removed."""
QUIET_FOR_S = 600.0
"""What was written to more recently may be live in a container, or on another machine with the same home."""
FRESH_BEAT_NS = 3_000_000_000
BEATS_WITHIN_S = 0.7
"""Ranks beat five times a second, on a loaded machine less often."""
_PLACE = "Choose another one with `--run-dir`, or set XDG_STATE_HOME to a writable directory."
_PREFIX = "run-"
_OUTPUT = "output"
_WRITTEN = (
    *("job.*", "head.*", "attach.*", "seeks.*", "clock.json", "history.*", "nodes.lock", "on-hang.log", "launcher.out"),
    *("events-*.jsonl", "*-*.ring", "indices-*.bin", "stacks-*.txt", "last-words-*.txt", "probe-*.log", "owner.json"),
)
"""What ``layout`` names of a watched run."""
_EVENTS = regex(r"events-(\d+)\.jsonl$")


def new_run_directory(named: str | None, plan: Mapping[str, Any] | None = None) -> Path:
    """Make a run directory of mode 0700, with the plan in it: the one that the user names, or a new one among the kept
    runs, or else in the temporary directory.

    Raises UsageError when the named one already holds a run or cannot be made, ConfigurationError when there is no
    place for a new one, or none for the plan.
    """
    if named is not None:
        return _planned(_named(Path(named)), plan)
    faults: list[str] = []
    for make in (_among_the_kept, _among_the_temporary):
        directory: Path | None = None
        try:
            directory = make()
            return _planned(directory, plan)
        except OSError as error:
            faults.append(str(error))
        except ConfigurationError as error:
            faults.append(error.message)
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
    raise ConfigurationError(f"no directory for the run could be created: {faults[0]}", _PLACE)


def _among_the_kept() -> Path:
    runs = kept_runs_directory()
    runs.mkdir(mode=0o700, parents=True, exist_ok=True)
    prune(runs)
    return Path(tempfile.mkdtemp(prefix=time.strftime(f"{_PREFIX}%Y%m%d-%H%M%S-"), dir=runs))


def _among_the_temporary() -> Path:
    # tempfile's own choice may be the current directory, which is the user's.
    place = os.environ.get("TMPDIR") or "/tmp"
    return Path(tempfile.mkdtemp(prefix=time.strftime(f"ddpdoctor-{_PREFIX}%Y%m%d-%H%M%S-"), dir=place)).absolute()


def _planned(directory: Path, plan: Mapping[str, Any] | None) -> Path:
    if plan is not None:
        write_plan(directory, plan)
    return directory


def unmade_run_directory(named: str | None) -> Path:
    """Return the run directory for a job that others start: the one that the user names, or a new name among the kept
    runs.

    The job's first process makes it, so that a job which never starts leaves none behind. Raises UsageError and
    ConfigurationError as ``new_run_directory`` does.
    """
    made = new_run_directory(named)
    if named is None:
        made.rmdir()
    return made


def kept_runs_directory() -> Path:
    """Return where the kept runs are; raises ConfigurationError where this user has no home."""
    try:
        return state_directory() / "runs"
    except RuntimeError as error:
        raise ConfigurationError(f"there is no directory for runs: {error}", _PLACE) from error


def named_run(name: str) -> Path:
    """Return the run directory that is meant: a directory, or the name of a kept run; raises UsageError for a file."""
    if Path(name).is_file():
        records = f"`ddpdoctor profile {name if name.endswith('.py') else 'train.py'}` creates one."
        raise UsageError(f"{name} is a file, but the record of a run is a directory", records)
    return (Path(name) if Path(name).is_dir() or "/" in name else kept_runs_directory() / name).absolute()


def kept_runs() -> list[Path]:
    """Return the kept runs, newest first."""
    try:
        found = [path for path in kept_runs_directory().glob(f"{_PREFIX}*") if (path / layout.JOB_FILE).is_file()]
    except (OSError, ConfigurationError):
        return []
    return sorted(found, key=lambda path: path.name, reverse=True)


def write_plan(directory: Path, plan: Mapping[str, Any]) -> None:
    """Write ``job.json`` whole or not at all: ranks may be reading it; raises ConfigurationError when it cannot be."""
    path = directory / layout.JOB_FILE
    part = path.with_suffix(".part")
    try:
        part.write_bytes(msgspec.json.encode({"clock": kept_clock(), **plan}))
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise ConfigurationError(f"cannot write {path}: {error.strerror or error}", _PLACE) from error


def live_processes(directory: Path) -> tuple[int, ...]:
    """Processes of a run that still live: by the files that they write and the run that their environment names.

    Those that cannot be seen from here, as in another container, by their beat alone.
    """
    try:
        names = os.listdir(directory)
    except OSError:
        return ()
    pids = [int(match[1]) for match in map(_EVENTS.match, names) if match]
    outer = OuterPids(directory)
    seen = tuple(sorted(pid for pid in pids if belongs(pid, directory) or outer.is_inside(pid)))
    return seen or _beating(directory, pids)


def _beating(directory: Path, pids: Iterable[int]) -> tuple[int, ...]:
    """Those whose heart beats; one that beat a moment ago is looked at twice, for it may just have ended."""
    since_ns = epoch_ns() - FRESH_BEAT_NS
    fresh = {pid: beat_ns for pid in pids if (beat_ns := _beat_ns(directory, pid)) > since_ns}
    if fresh:
        time.sleep(BEATS_WITHIN_S)
    return tuple(sorted(pid for pid, beat_ns in fresh.items() if _beat_ns(directory, pid) != beat_ns))


def _beat_ns(directory: Path, pid: int) -> int:
    """When a rank of a watched run beat last; 0 where that is not known."""
    try:
        ring = RingTail(directory / layout.STEPS_FILE.format(pid), layout.STEPS)
    except (RecordError, OSError, ValueError):
        return 0
    try:
        return ring.heartbeat().beat_at_ns
    finally:
        ring.close()


def belongs(pid: int, directory: Path) -> bool:
    """Return whether a process lives and is of the run: process ids are used again."""
    return 0 < pid < 1 << 31 and is_alive(pid) and is_of_run(pid, directory) is not False


def prune(runs: Path) -> None:
    """Remove the oldest runs beyond ``MOST_RUNS`` and ``MOST_BYTES``."""
    held = 0
    for number, directory in enumerate(kept_runs(), 1):
        held += size_bytes(directory)
        too_many = number >= MOST_RUNS or held > MOST_BYTES
        if too_many and not live_processes(directory) and written_ago_s(directory) > QUIET_FOR_S:
            remove_run(directory)


def remove_run(directory: Path) -> None:
    """Remove what a run writes; what else someone has put beside it stays, and the directory with it."""
    if directory.is_symlink():
        return
    shutil.rmtree(directory / _OUTPUT, ignore_errors=True)
    with suppress(OSError):
        for name in os.listdir(directory):
            if any(fnmatch(name, pattern) for pattern in _WRITTEN):
                (directory / name).unlink()
        directory.rmdir()


def written_ago_s(directory: Path) -> float:
    """Return for how long nothing was written to a run; its ranks may be where no one sees them from here."""
    try:
        return time.time() - max(entry.stat().st_mtime for entry in os.scandir(directory))
    except (OSError, ValueError):
        return 0.0


def size_bytes(directory: Path) -> int:
    """Return the size of a run's files; 0 where they cannot be listed."""
    try:
        return sum(entry.stat().st_size for entry in os.scandir(directory))
    except OSError:
        return 0


def _named(directory: Path) -> Path:
    if (directory / layout.JOB_FILE).exists():
        raise UsageError(
            f"{directory} already holds a run",
            f"Choose a new directory; `ddpdoctor profile --run-dir {directory}` alone attaches to that run.",
        )
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.listdir(directory):
            raise UsageError(
                f"{directory} is not empty and does not hold a run", "Choose a new directory with `--run-dir`."
            )
        if directory.stat().st_uid == os.getuid():
            directory.chmod(0o700)
        tempfile.TemporaryFile(dir=directory).close()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot use {directory} as a run directory: {getattr(error, 'strerror', '') or error}"
        ) from error
    return directory.absolute()


# Which process made a run directory, on which machine: two machines, or two containers, may share one home.

OWNER_FILE = "owner.json"
Standing = Literal["alive", "dead", "elsewhere", "unknown"]


class Owner(msgspec.Struct, frozen=True):
    """A process, such that no other one of any machine is taken for it."""

    host: str
    machine: str
    """The installation's own number; empty where it has none, as in most containers."""
    boot: str
    """Changes with every start of the machine."""
    pid_namespace: str
    """Process ids mean something in it alone."""
    pid: int
    started: str
    """When the process was started, in ticks since the machine was: ids are used again."""


def this_process() -> Owner:
    """Return the owner of what this process makes."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    pid = os.getpid()
    return Owner(
        host=socket.gethostname(),
        machine=_read("/etc/machine-id"),
        boot=_read("/proc/sys/kernel/random/boot_id"),
        pid_namespace=namespace,
        pid=pid,
        started=_started(pid),
    )


def sign(directory: Path) -> None:
    """Write who makes a run directory; raises OSError."""
    (directory / OWNER_FILE).write_bytes(msgspec.json.encode(this_process()))


def owner_of(directory: Path) -> Owner | None:
    """Return who made a run directory; None where that is not known."""
    try:
        return msgspec.convert(json.loads(read_untrusted(directory / OWNER_FILE, 1 << 16, directory)), Owner)
    except (OSError, ValueError, RecursionError):
        return None


def standing(owner: Owner | None) -> Standing:
    """Return whether an owner still runs; ``elsewhere`` when only its own machine or container can tell."""
    if owner is None:
        return "unknown"
    here = this_process()
    if owner.host != here.host:
        return "elsewhere"
    if owner.boot == here.boot:
        if owner.pid_namespace != here.pid_namespace:
            return "elsewhere"
        return "alive" if owner.started and _started(owner.pid) == owner.started else "dead"
    # The same machine after a new start, or another one of the same name.
    return "dead" if owner.machine and owner.machine == here.machine else "elsewhere"


def _started(pid: int) -> str:
    """When a process was started; empty when there is none, or it is a zombie."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in ("Z", "X") else ""


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


_RUN_PREFIX = "rehearsal-"
_KEPT = "kept-for-cleaning"


def state_directory() -> Path:
    """Return where the tool keeps its state: ``$XDG_STATE_HOME/ddpdoctor``, by default under ``~/.local/state``.

    Raises RuntimeError where this user has no home.
    """
    base = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "ddpdoctor"
    home = home_directory()
    if home is None:
        raise RuntimeError("neither HOME nor the system gives a home directory")
    return home / ".local" / "state" / "ddpdoctor"


@contextmanager
def temporary_run_directory() -> Iterator[Path]:
    """A new directory of mode 0700 that is gone afterwards, unless ``keep_for_cleaning`` was asked for.

    Raises ``ConfigurationError`` when neither the state directory nor the temporary one can be written.
    """
    directory = _make()
    try:
        yield directory
    finally:
        if not (directory / _KEPT).exists():
            remove_run_directory(directory)


def remove_run_directory(directory: Path) -> None:
    """Remove a run directory of ours, and the layers of an overlay in it; what is in the way of that stays.

    So does what has taken its place meanwhile, if that is a link or another user's.
    """
    if _is_own_directory(directory):
        remove_layers(directory)
        shutil.rmtree(directory, ignore_errors=True)


def keep_for_cleaning(directory: Path) -> None:
    """Keep a run directory: what its ranks left in the user's tree is for ``ddpdoctor clean`` to report."""
    with suppress(FileExistsError):  # no link that the script has put there is followed
        (directory / _KEPT).touch(exist_ok=False)


def rehearsal_directories() -> list[Path]:
    """Return the run directories of rehearsals that run, or were killed; oldest first."""
    places = [(Path(os.environ.get("TMPDIR") or "/tmp"), f"ddpdoctor-{_RUN_PREFIX}")]  # gettempdir() would write there
    try:
        places.append((state_directory() / "runs", _RUN_PREFIX))
    except RuntimeError:
        pass
    found: list[Path] = []
    for place, prefix in places:
        try:
            found += filter(_is_own_directory, place.glob(f"{prefix}*"))
        except OSError:
            continue
    return sorted(found, key=lambda path: path.name.removeprefix("ddpdoctor-"))


def _is_own_directory(path: Path) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _make() -> Path:
    prefix = time.strftime(f"{_RUN_PREFIX}%Y%m%d-%H%M%S-")
    try:
        runs = state_directory() / "runs"
        runs.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _signed(Path(tempfile.mkdtemp(prefix=prefix, dir=runs)))
    except (OSError, RuntimeError):
        pass
    try:
        return _signed(Path(tempfile.mkdtemp(prefix="ddpdoctor-" + prefix)))
    except OSError as error:
        raise ConfigurationError(
            f"no directory for the run could be created: {error}", "set XDG_STATE_HOME to a writable directory"
        ) from error


def _signed(directory: Path) -> Path:
    sign(directory)
    return directory
