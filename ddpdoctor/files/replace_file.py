"""Puts content in the place of a file at once: who reads it meanwhile sees the old content or the new, never a part."""

from __future__ import annotations

import errno
import os
from contextlib import suppress

_IN_THE_WAY = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY})
"""Why a file that can be written may not be replaced: its directory is read-only, or it is a mount point itself, as a
single file that is handed to a container."""
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL})
"""What file systems without hard links answer, such as FAT and some of FUSE."""


def replace_file(path: str, content: bytes, before: os.stat_result | None) -> None:
    """Write ``content`` to ``path``, which is no link; ``before`` is what was there, None for nothing.

    Mode, owner and attributes stay. Raises FileExistsError when something has come there meanwhile, OSError when it
    cannot be written.
    """
    temporary = os.path.join(os.path.dirname(path) or ".", f".ddpdoctor-{os.urandom(6).hex()}.part")
    try:
        _write_new(temporary, content, path, before)
        try:
            _put(temporary, path, before)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
    except FileExistsError:
        raise
    except OSError as error:
        if before is None or error.errno not in _IN_THE_WAY:
            raise
        _refuse_a_change(path, before)
        with open(path, "r+b") as stream:
            if len(content) > before.st_size:
                os.posix_fallocate(stream.fileno(), 0, len(content))  # or else a full disk would leave a half of it
            stream.write(content)
            stream.truncate()


def _write_new(temporary: str, content: bytes, path: str, before: os.stat_result | None) -> None:
    mode = 0o666 if before is None else before.st_mode & 0o7777
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode & 0o666)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(descriptor)
            if before is not None:
                now = os.fstat(descriptor)
                if (now.st_uid, now.st_gid) != (before.st_uid, before.st_gid):
                    with suppress(OSError):
                        os.fchown(descriptor, before.st_uid, before.st_gid)
                os.fchmod(descriptor, mode)
                # Of a file with an access list the mode's group bits are the mask: without the list they would open it.
                with suppress(OSError):
                    for name in os.listxattr(path):
                        os.setxattr(descriptor, name, os.getxattr(path, name))
    except BaseException:
        os.unlink(temporary)
        raise


def _put(temporary: str, path: str, before: os.stat_result | None) -> None:
    if before is None:
        try:
            os.link(temporary, path)  # refuses what is there, which a rename would overwrite
            return
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
    else:
        _refuse_a_change(path, before)
    os.replace(temporary, path)


def _refuse_a_change(path: str, before: os.stat_result) -> None:
    now = os.lstat(path)
    if _identity(now) != _identity(before):
        raise FileExistsError(errno.EEXIST, "it was changed in the meantime", path)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
