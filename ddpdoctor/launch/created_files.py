"""Lists and removes the files that the ranks of a rehearsal made, once none of its processes runs any more.

The ranks' log is not taken at its word. A file counts only if its record is undamaged, its directories hold no symbolic
link, the log never says that it was there before, the file system shows it in the very state in which a rank left it,
and no other program has it open. Whatever is in doubt stays, and is told with the reason.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import secrets
import stat
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ddpdoctor.files.untrusted import read_untrusted
from ddpdoctor.launch.kept_runs import (
    Owner,
    live_processes,
    owner_of,
    rehearsal_directories,
    remove_run_directory,
    standing,
)
from ddpdoctor.probe.rehearsal.files.created_log import (
    CLOCK_SLACK_NS,
    LOG_NAME,
    CreatedFiles,
    Made,
    Record,
    Replay,
    decode,
    identity_of,
    status_of_name,
)
from ddpdoctor.record import layout

# When a file was made, which Linux has in `statx` alone.

_AT_FDCWD = -100
_AT_SYMLINK_NOFOLLOW = 0x100
_STATX_BTIME = 0x800
_STATX_BYTES = 256
_BTIME_OFFSET = 80
"""``struct statx``: the mask of filled fields comes first, ``stx_btime`` (seconds, nanoseconds) at byte 80."""


def born_ns(path: str) -> int | None:
    """Return when the file at ``path`` (not what it links to) was made, in ns since the epoch; None when unknown."""
    if not sys.platform.startswith("linux"):
        return _born_by_stat(path)
    try:
        statx = ctypes.CDLL(None, use_errno=True).statx
    except (OSError, AttributeError):
        return None
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(_AT_FDCWD, os.fsencode(path), _AT_SYMLINK_NOFOLLOW, ctypes.c_uint(_STATX_BTIME), answer) != 0:
        return None
    (mask,) = struct.unpack_from("=I", answer, 0)
    if not mask & _STATX_BTIME:
        return None
    seconds, nanoseconds = struct.unpack_from("=qI", answer, _BTIME_OFFSET)
    return int(seconds) * 1_000_000_000 + int(nanoseconds)


def _born_by_stat(path: str) -> int | None:
    try:
        seconds = getattr(os.lstat(path), "st_birthtime", None)
    except OSError:
        return None
    return None if seconds is None else int(seconds * 1e9)


CHANGED = "it changed since"
UNFINISHED = "the rank that created it was killed before recording its state"
DOUBTFUL = "another program also wrote to it"
IN_USE = "another program has it open"
HOLDS_OTHERS = "it has other content"
REFUSED = "it cannot be removed: "


_LONGEST_LOG = 1 << 27
"""Bytes; a file costs about 400."""


class Left(msgspec.Struct, frozen=True):
    """What stays where it is."""

    path: str
    reason: str
    """A clause, such as ``it changed since``."""


class Cleaning(msgspec.Struct, frozen=True):
    """What happened to what the ranks made."""

    made: tuple[str, ...] = ()
    """Absolute paths of what is certainly the ranks' and unchanged, directories before their content."""
    left: tuple[Left, ...] = ()
    """What is there and is not touched, sorted by path."""


def created_paths(run_directory: Path) -> Cleaning:
    """Judge what the ranks made and is there."""
    return _judged(run_directory, _replayed(run_directory))


def _replayed(run_directory: Path) -> Replay:
    """Replay the log; one that is no file of the directory, or too long, says nothing, and nothing is removed."""
    replay = Replay()
    try:
        log = read_untrusted(run_directory / LOG_NAME, _LONGEST_LOG, run_directory)
    except OSError:
        return replay
    for line in log.split(b"\n"):
        record = decode(line)
        if record is not None:
            replay.apply(record)
    return replay


def _judged(run_directory: Path, replay: Replay) -> Cleaning:
    home = os.path.realpath(run_directory)
    began_ns = born_ns(os.path.join(home, LOG_NAME)) or 0
    certain, left = [], []
    for path, made in sorted(replay.entries.items()):
        if path in replay.foreign or os.path.commonpath([path, home]) in (path, home):
            continue
        reason = _reason_to_leave(path, made, began_ns)
        if reason == "":
            certain.append(path)
        elif reason is not None:
            left.append(Left(path, reason))
    used = _used_elsewhere(certain)
    left += [Left(path, IN_USE) for path in used]
    goes: set[str] = set()
    for path in reversed(certain):
        if path in used:
            continue
        if replay.entries[path].kind == "directory" and not _holds_only(path, goes):
            left.append(Left(path, HOLDS_OTHERS))
        else:
            goes.add(path)
    return Cleaning(tuple(sorted(goes)), tuple(sorted(left, key=lambda each: each.path)))


def _holds_only(directory: str, paths: set[str]) -> bool:
    try:
        return all(os.path.join(directory, name) in paths for name in os.listdir(directory))
    except OSError:
        return False


def remove_created(run_directory: Path) -> Cleaning:
    """Remove what is certainly the ranks' and unchanged; return what was removed, and what was left and why.

    A directory goes only when it is empty by then.
    """
    replay = _replayed(run_directory)
    found = _judged(run_directory, replay)
    removed, left = [], list(found.left)
    log = CreatedFiles(str(run_directory))
    for path in reversed(found.made):
        reason = _remove(path, replay, log)
        if reason:
            left.append(Left(path, reason))
        else:
            removed.append(path)
    return Cleaning(tuple(sorted(removed)), tuple(sorted(left, key=lambda each: each.path)))


def _reason_to_leave(path: str, made: Made, began_ns: int) -> str | None:
    """Why a path is not to be touched; empty when it may be removed, None when nothing that the ranks made is there."""
    status = status_of_name(path)
    directory = os.path.dirname(path)
    if status is None or directory == path or os.path.realpath(directory) != directory:
        return None
    if not made.is_of_kind(status):
        return None
    born = born_ns(path)
    if born is not None and born < max(began_ns, made.time_ns) - CLOCK_SLACK_NS and made.kind != "name":
        return None if born < began_ns - CLOCK_SLACK_NS else CHANGED
    if made.doubtful:
        return DOUBTFUL
    if made.is_certain(status):
        # A directory says nothing of itself when its number is used again, but for when it was made.
        again = made.kind == "directory" and born is not None and born > made.settled_ns + CLOCK_SLACK_NS
        return CHANGED if again else ""
    return UNFINISHED if made.may_be_unfinished(status) else CHANGED


def _remove(path: str, replay: Replay, log: CreatedFiles) -> str:
    """Remove one thing; a reason where it stays.

    A file is moved to a name of its own first, which the log knows: what another program puts at ``path`` in this very
    moment is not removed, and what turns out to be another's is moved back.
    """
    status = status_of_name(path)
    if status is None:
        return ""
    try:
        if stat.S_ISDIR(status.st_mode):
            os.rmdir(path)
            return ""
        aside = os.path.join(os.path.dirname(path), f".ddpdoctor-{secrets.token_hex(8)}")
        log.note(replay.entries[path].kind, aside, moved_from=path)
        before = identity_of(status)
        os.rename(path, aside)
    except OSError as error:
        is_full = error.errno in (errno.ENOTEMPTY, errno.EEXIST)
        return HOLDS_OTHERS if is_full else REFUSED + (error.strerror or str(error))
    moved = os.lstat(aside)
    if replay.entries[path].is_certain(status) and identity_of(moved)[:4] == before[:4]:
        if status.st_nlink > 1:
            # The file's other names, which may be ours too, see another time of change from now on.
            replay.apply(Record("relabelled", path, time.time_ns()))
        os.unlink(aside)
        return ""
    try:
        os.link(aside, path, follow_symlinks=False)
        os.unlink(aside)
    except OSError:
        return f"{CHANGED}; the replaced file is {aside}"
    return CHANGED


def _used_elsewhere(paths: list[str]) -> set[str]:
    """Return the files among ``paths`` that some process has open: what it still writes would be lost with them."""
    files: dict[tuple[int, int], set[str]] = {}
    for path in paths:
        status = status_of_name(path)
        if status is not None and stat.S_ISREG(status.st_mode):
            files.setdefault((status.st_dev, status.st_ino), set()).add(path)
    used: set[str] = set()
    if files:
        for place in _open_files():
            used |= files.get(place, set())
    return used


def _open_files() -> Iterator[tuple[int, int]]:
    """Device and inode of every file that a process has open, as far as the system shows it."""
    try:
        processes = [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return
    for process in processes:
        directory = f"/proc/{process}/fd"
        try:
            descriptors = os.listdir(directory)
        except OSError:
            continue
        for descriptor in descriptors:
            try:
                status = os.stat(f"{directory}/{descriptor}")
            except OSError:
                continue
            yield status.st_dev, status.st_ino


# What rehearsals that were killed left behind: in the user's tree, and of run directories of our own.
#
# Nothing in the user's tree is removed unless the user asks for it; a run directory of ours goes once there is nothing
# left to ask.


class Leftover(msgspec.Struct, frozen=True):
    """A rehearsal that did not reach its end, or that cannot be judged from here."""

    run_directory: Path
    script: str
    """Absolute; empty where it is not known."""
    files: Cleaning
    owner: Owner | None
    foreign: bool
    """Only its own machine or container can tell whether it still runs: nothing of it is touched here."""

    @property
    def unclear(self) -> tuple[Left, ...]:
        """What may be its own and is not certain; what changed since is the user's, and no leftover."""
        return tuple(left for left in self.files.left if left.reason not in (CHANGED, HOLDS_OTHERS))


def leftovers() -> list[Leftover]:
    """Return what is left of rehearsals, oldest first; removes the run directories of those that left nothing."""
    found = []
    for directory in rehearsal_directories():
        owner = owner_of(directory)
        state = standing(owner)
        plan = _plan(directory)
        if plan is None:
            continue  # Whether what it made was to be kept is not known.
        # The numbers of processes in a box mean nothing out here, and they end with the supervisor.
        boxed = plan.get("mount_points") is not None
        if state == "alive" or (state == "dead" and not boxed and live_processes(directory)):
            continue
        kept = bool(plan.get("keep"))
        leftover = Leftover(
            run_directory=directory,
            script=str(job.get("script", "")) if isinstance(job := plan.get("job"), dict) else "",
            files=Cleaning() if kept else created_paths(directory),
            owner=owner,
            foreign=state != "dead",
        )
        if leftover.foreign or leftover.files.made or leftover.unclear:
            found.append(leftover)
        else:
            remove_run_directory(directory)
    return found


def clean_up(leftover: Leftover) -> Cleaning:
    """Remove what is certainly a rehearsal's and unchanged, and its run directory; say what was removed and what left.

    The run directory stays while something could not be removed, or is in use.
    """
    done = remove_created(leftover.run_directory)
    rest = created_paths(leftover.run_directory)
    if not rest.made and not any(left.reason == IN_USE for left in rest.left):
        remove_run_directory(leftover.run_directory)
    return done


def _plan(directory: Path) -> dict[str, object] | None:
    """Return what was asked for; None where that cannot be read."""
    if not os.path.lexists(directory / layout.JOB_FILE):
        return {}
    try:
        plan = json.loads(read_untrusted(directory / layout.JOB_FILE, 1 << 23, directory))
    except (OSError, ValueError, RecursionError):
        return None
    return plan if isinstance(plan, dict) else None


def leftovers_text(found: list[Leftover]) -> str:
    """Return one line that says what is left, and how to be rid of it; empty when there is nothing to be reported."""
    paths = [path for leftover in found if not leftover.foreign for path in leftover.files.made]
    paths += [left.path for leftover in found if not leftover.foreign for left in leftover.unclear]
    if not paths:
        return ""
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"note: a rehearsal that was killed left {paths[0]}{more}; `ddpdoctor clean` shows and removes what it left"
