"""Lists and removes the files that the ranks of a rehearsal made.

The ranks' log is not taken at its word. A path of the log counts only if its record is undamaged, its directories hold
no symbolic link, the log never says that it was there before, and the file system itself shows that what lies there now
was made after the rehearsal began and after the record was written.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ddpdoctor.launch.birth_time import born_ns
from ddpdoctor.rehearsal.created_log import LOG_NAME, Created, Replay, read_log

_CLOCK_SLACK_NS = 50_000_000
"""File systems stamp files with a clock that lags by up to one kernel tick, 10 ms at most."""


def created_paths(run_directory: Path) -> tuple[str, ...]:
    """Return the absolute paths of what the ranks made and is still there, directories before their content."""
    replay = Replay()
    first_record_ns: int | None = None
    for record in read_log(str(run_directory)):
        first_record_ns = record.time_ns if first_record_ns is None else min(first_record_ns, record.time_ns)
        replay.apply(record)
    if first_record_ns is None:
        return ()
    home = os.path.realpath(run_directory)
    began_ns = born_ns(os.path.join(home, LOG_NAME)) or first_record_ns
    return tuple(
        path
        for path, created in sorted(replay.entries.items())
        if path not in replay.foreign
        and os.path.commonpath([path, home]) not in (path, home)
        and _is_proved(path, created, max(began_ns, created.time_ns) - _CLOCK_SLACK_NS)
    )


def remove_created(run_directory: Path) -> tuple[str, ...]:
    """Remove what the ranks made and return the absolute paths that are gone.

    A directory goes only when it is empty by then. What could not be removed, ``created_paths`` returns afterwards.
    """
    removed = []
    for path in reversed(created_paths(run_directory)):
        try:
            if os.path.isdir(path) and not os.path.islink(path):
                os.rmdir(path)
            else:
                os.unlink(path)
        except OSError:
            continue
        removed.append(path)
    return tuple(sorted(removed))


def _is_proved(path: str, created: Created, not_before_ns: int) -> bool:
    """Tell whether what lies at ``path`` is of the kind that was recorded and was made after ``not_before_ns``."""
    directory = os.path.dirname(path)
    try:
        status = os.lstat(path)
    except (OSError, ValueError):
        return False
    if directory == path or os.path.realpath(directory) != directory:
        return False
    if created.kind == "name" and stat.S_ISREG(status.st_mode):
        return status.st_nlink > 1 and status.st_ctime_ns >= not_before_ns
    if not _is_of_kind(status.st_mode, created.kind):
        return False
    born = born_ns(path)
    return (status.st_ctime_ns if born is None else born) >= not_before_ns


def _is_of_kind(mode: int, kind: str) -> bool:
    if kind == "directory":
        return stat.S_ISDIR(mode)
    if kind == "socket":
        return stat.S_ISSOCK(mode)
    if kind == "name":
        return stat.S_ISLNK(mode)
    return stat.S_ISREG(mode)
