"""Makes and removes the directory that a run writes its evidence to."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import msgspec

from ddpdoctor.errors import ConfigurationError
from ddpdoctor.files.patterns import home_directory
from ddpdoctor.files.untrusted import read_untrusted
from ddpdoctor.launch.box.start import remove_layers

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


_PREFIX = "rehearsal-"
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
    places = [(Path(os.environ.get("TMPDIR") or "/tmp"), f"ddpdoctor-{_PREFIX}")]  # gettempdir() would write there
    try:
        places.append((state_directory() / "runs", _PREFIX))
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
    prefix = time.strftime(f"{_PREFIX}%Y%m%d-%H%M%S-")
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
