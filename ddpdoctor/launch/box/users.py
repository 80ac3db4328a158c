"""A user namespace in which every process keeps the user and the groups that it has outside.

Without a power of root only the process's own user and group can have a number in it. Then an overlay cannot take over
what belongs to others, not even where the user may write to it: the kernel answers EOVERFLOW.
"""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Iterable, Sequence

from . import kernel

Ranges = Sequence[tuple[int, int]]
"""First number and count."""


def enter_user_namespace(flags: int, places: Iterable[str]) -> None:
    """Make the namespace, and those of ``flags`` in it.

    Raises OSError where the kernel does not allow it, or where one of ``places``, directories in which the script is
    likely to write, belongs to someone whom an overlay cannot stand for.
    """
    owners = [(place, os.stat(place)) for place in places]
    all_users, all_groups = _ranges("/proc/self/uid_map"), _ranges("/proc/self/gid_map")
    own_user, own_group = [(os.geteuid(), 1)], [(os.getegid(), 1)]
    if _unshare_and_map(flags, all_users, all_groups):
        return
    for place, status in owners:
        if not (_holds(own_user, status.st_uid) and _holds(own_group, status.st_gid)):
            raise OSError(f"{place} belongs to {_owner(status)}, and cannot be covered by an overlay of this user")
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/gid_map", _lines(own_group))
    _write("/proc/self/uid_map", _lines(own_user))


def _unshare_and_map(flags: int, users: Ranges, groups: Ranges) -> bool:
    """Make the namespaces; True when a process that stayed outside could map every user and group."""
    waiting, ready = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(ready)
        os.read(waiting, 1)
        parent = os.getppid()
        try:
            _write(f"/proc/{parent}/gid_map", _lines(groups))
            _write(f"/proc/{parent}/uid_map", _lines(users))
        except OSError:
            os._exit(1)
        os._exit(0)
    os.close(waiting)
    try:
        kernel.unshare(kernel.NEW_USERS)
    finally:
        os.close(ready)
        _, status = os.waitpid(helper, 0)
    kernel.unshare(flags)
    return status == 0


def _ranges(path: str) -> Ranges:
    """Return the numbers that users, or groups, have in this process's own namespace."""
    with open(path, encoding="ascii") as file:
        return [(int(inside), int(count)) for inside, _, count in map(str.split, file)]


def _holds(ranges: Ranges, number: int) -> bool:
    return any(first <= number < first + count for first, count in ranges)


def _lines(ranges: Ranges) -> str:
    return "".join(f"{first} {first} {count}\n" for first, count in ranges)


def _owner(status: os.stat_result) -> str:
    try:
        user = pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        user = str(status.st_uid)
    try:
        group = grp.getgrgid(status.st_gid).gr_name
    except KeyError:
        group = str(status.st_gid)
    return f"user {user} and group {group}"


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)
