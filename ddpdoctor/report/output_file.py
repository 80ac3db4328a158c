"""Files that a report goes to: nothing that is not a report of ours is overwritten, unless the user insists.

Whether a file may be written is asked twice: before minutes are spent on what shall stand in it, and when it is
written. A regular file is replaced at once, by a new one with its mode; a link stays one; a pipe, a terminal or
``/dev/stdout`` is written to.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path

from ddpdoctor.errors import UsageError
from ddpdoctor.files.replace_file import replace_file
from ddpdoctor.files.untrusted import read_untrusted
from ddpdoctor.report.own_reports import LARGEST_BYTES, encoded, is_own_report, sealed

STEP_SUMMARY = "GITHUB_STEP_SUMMARY"
"""Names the file whose Markdown GitHub shows below a job."""
READER_WITHIN_S = 5.0
"""How long someone is waited for who reads from a named pipe."""
_CODE = frozenset({".py", ".pyw", ".pyi", ".ipynb"})
_STREAMS = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}
_SUMMARY_SUFFIXES = frozenset({"", ".md", ".markdown"})
_OF_A_RUNNER = "step_summary_"
"""How the runner of GitHub calls the file, which starts empty with each step."""


class OutputFile:
    """A file that a report shall be written to."""

    def __init__(self, name: str, *, force: bool = False, sources: Iterable[Path] = ()) -> None:
        self._name = name
        self._force = force
        self._sources = tuple(sources)
        self._appends = is_step_summary(name)

    def refuse(self) -> None:
        """Raise UsageError for what must not, or cannot, be written."""
        if self._appends:
            refuse_step_summary(self._name, self._sources)
        elif _descriptor(self._name) is None:
            self._status()

    def write_text(self, text: str, output_format: str) -> None:
        """Write a report in a format of ``ddpdoctor.report.formats``, a ``text`` of a run, or a ``diff``.

        Raises UsageError when that is not possible, or not allowed.
        """
        self.write(encoded(sealed(text, output_format) if self._is_kept() else text))

    def write(self, content: bytes) -> None:
        """Write a report; raises as ``write_text`` does."""
        try:
            if self._appends:
                append_step_summary(self._name, content, self._sources)
            elif (descriptor := _descriptor(self._name)) is not None:
                _write_all(descriptor, content)
            else:
                self._write_file(content)
        except FileExistsError as error:
            raise UsageError(f"cannot write {self._name}: it was created or changed in the meantime") from error
        except OSError as error:
            raise _cannot(self._name, error) from error

    def _is_kept(self) -> bool:
        """Return whether the report becomes a file of its own, which the next one may find."""
        return not self._appends and (os.path.isfile(self._name) or not os.path.exists(self._name))

    def _write_file(self, content: bytes) -> None:
        before = self._status()
        if before is None or stat.S_ISREG(before.st_mode):
            replace_file(os.path.realpath(self._name), content, before)
            return
        descriptor = _opened(self._name, pipe=stat.S_ISFIFO(before.st_mode))
        try:
            _write_all(descriptor, content)
        finally:
            os.close(descriptor)

    def _status(self) -> os.stat_result | None:
        """Return what the file is, None when there is none; raises UsageError when it must not be written."""
        if not self._name:
            raise UsageError("cannot write a file without a name")
        try:
            status = os.stat(self._name)
        except FileNotFoundError:
            self._refuse_place()
            return None
        except (OSError, ValueError) as error:
            raise _cannot(self._name, error) from error
        if stat.S_ISREG(status.st_mode):
            self._refuse_content(status)
            if not os.access(self._name, os.W_OK):
                raise UsageError(f"cannot write {self._name}: it is read-only")
        elif not (stat.S_ISCHR(status.st_mode) or stat.S_ISFIFO(status.st_mode)):
            raise UsageError(f"cannot write {self._name}: it is {_kind(status.st_mode)}")
        return status

    def _refuse_place(self) -> None:
        name = os.path.realpath(self._name)
        parent = os.path.dirname(name)
        if not os.path.isdir(parent):
            raise UsageError(f"cannot write {self._name}: there is no directory {parent}")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise UsageError(f"cannot write {self._name}: the directory {parent} is read-only")

    def _refuse_content(self, status: os.stat_result) -> None:
        problem = _is_code(self._name, status, self._sources)
        if problem:
            raise UsageError(f"cannot write {self._name}: {problem}")
        if self._force:
            return
        if status.st_size > LARGEST_BYTES or not is_own_report(_content(self._name)):
            raise UsageError(
                f"cannot write {self._name}: it exists and is not an unmodified ddpdoctor report",
                "Choose another file, or overwrite it with `--force`.",
            )


def is_step_summary(name: str) -> bool:
    """Return whether a file is the summary of a step of GitHub Actions, which several programs append to."""
    summary = os.environ.get(STEP_SUMMARY)
    return bool(name and summary) and os.path.realpath(name) == os.path.realpath(summary or "")


def refuse_step_summary(name: str, sources: Iterable[Path]) -> None:
    """Raise UsageError when Markdown must not, or cannot, be appended to ``name``, which the environment names."""
    try:
        if _is_no_markdown(name):
            raise UsageError(
                f"{STEP_SUMMARY} names {name}, to which nothing is appended: {_NO_MARKDOWN}", _SUMMARY_HINT
            )
        status = os.stat(name)
    except FileNotFoundError:
        parent = os.path.dirname(os.path.realpath(name))
        if os.path.isdir(parent) and os.access(parent, os.W_OK | os.X_OK):
            return
        raise UsageError(f"{STEP_SUMMARY} names {name}, which cannot be created in {parent}", _SUMMARY_HINT) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{STEP_SUMMARY} names {name}: {_reason(error)}", _SUMMARY_HINT) from error
    if stat.S_ISCHR(status.st_mode):
        return
    problem = _is_code(name, status, sources) or _is_no_summary(name, status)
    if problem:
        raise UsageError(f"{STEP_SUMMARY} names {name}, to which nothing is appended: {problem}", _SUMMARY_HINT)


def append_step_summary(name: str, content: bytes, sources: Iterable[Path]) -> None:
    """Append Markdown to the summary in one piece; raises UsageError as ``refuse_step_summary`` does, and OSError."""
    refuse_step_summary(name, sources)
    descriptor = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY, 0o666)
    try:
        _write_all(descriptor, content)
    finally:
        os.close(descriptor)


_SUMMARY_HINT = f"Unset {STEP_SUMMARY}, or point it to the file that the runner created."


_NO_MARKDOWN = "its name is not that of a Markdown file"


def _is_no_markdown(name: str) -> bool:
    real = Path(os.path.realpath(name))
    suffixes = {Path(name).suffix.lower(), real.suffix.lower()}
    return not real.name.startswith(_OF_A_RUNNER) and not suffixes <= _SUMMARY_SUFFIXES and not real.is_char_device()


def _is_no_summary(name: str, status: os.stat_result) -> str:
    """Why a file cannot be a summary; empty when it may be one."""
    if not stat.S_ISREG(status.st_mode):
        return f"it is {_kind(status.st_mode)}"
    if not os.access(name, os.W_OK):
        return "it is read-only"
    real = Path(os.path.realpath(name))
    if real.name.startswith(_OF_A_RUNNER) or not status.st_size:
        return ""
    content = _content(name) if status.st_size <= LARGEST_BYTES else b"\0"
    if status.st_mode & 0o111 or content.startswith(b"#!") or b"\0" in content or _holds_code(content):
        return "it holds a program or data, not Markdown"
    return ""


def _holds_code(content: bytes) -> bool:
    """Return whether a text is an object of JSON, or statements to Python, for which it takes settings as well.

    A line of Markdown may be an expression (``Done``, ``- item``) and a comment (``# Results``), but no statement.
    """
    import ast
    import warnings

    if content.lstrip().startswith(b"{"):
        return True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            body = ast.parse(content).body
        return any(not isinstance(line, ast.Expr) or isinstance(line.value, ast.Call) for line in body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _is_code(name: str, status: os.stat_result, sources: Iterable[Path]) -> str:
    """Why a file is certainly no report, even when the user insists; empty when it may be one."""
    for source in sources:
        try:
            if os.path.samestat(os.stat(source), status):
                return "it is the script under examination"
        except (OSError, ValueError):
            continue
    real = Path(os.path.realpath(name))
    if stat.S_ISREG(status.st_mode) and {Path(name).suffix.lower(), real.suffix.lower()} & _CODE:
        return "it is a Python file that exists already" if real.suffix != ".ipynb" else "it is a notebook"
    return ""


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a directory"
    if stat.S_ISBLK(mode):
        return "a block device"
    if stat.S_ISSOCK(mode):
        return "a socket"
    return "a pipe" if stat.S_ISFIFO(mode) else "not a regular file"


def _content(name: str) -> bytes:
    try:
        return read_untrusted(name, LARGEST_BYTES)
    except OSError as error:
        raise _cannot(name, error) from error


def _descriptor(name: str) -> int | None:
    """Return the open file of this process that a name such as ``/dev/stdout`` or ``/dev/fd/63`` stands for.

    To open such a name again would begin at the start of a file that the shell has redirected a stream to.
    """
    path = os.path.abspath(name) if name else ""
    for _ in range(8):
        directory, base = os.path.split(path)
        if path in _STREAMS or (base.isdecimal() and os.path.realpath(directory) == f"/proc/{os.getpid()}/fd"):
            number = _STREAMS.get(path, -1) if path in _STREAMS else int(base)
            return number if _is_writable(name, number) else None
        if not os.path.islink(path):
            return None
        path = os.path.normpath(os.path.join(directory, os.readlink(path)))
    return None


def _is_writable(name: str, descriptor: int) -> bool:
    import fcntl

    try:
        mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
    except (OSError, OverflowError):
        raise UsageError(f"cannot write {name}: it is not open") from None
    if mode == os.O_RDONLY:
        raise UsageError(f"cannot write {name}: it is open for reading only")
    return True


def _opened(name: str, *, pipe: bool) -> int:
    """Open a device, or a named pipe as soon as someone reads from it; raises OSError when no one does."""
    flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY
    if not pipe:
        return os.open(name, flags)
    until_s = time.monotonic() + READER_WITHIN_S
    while True:
        try:
            descriptor = os.open(name, flags | os.O_NONBLOCK)
            os.set_blocking(descriptor, True)
            return descriptor
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            if time.monotonic() > until_s:
                raise OSError(errno.ENXIO, "the pipe has no reader", name) from error
        time.sleep(0.05)


def _write_all(descriptor: int, content: bytes) -> None:
    """Write to a descriptor; a reader who goes ends the output, not the command."""
    left = memoryview(content)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except (BrokenPipeError, ConnectionResetError):
        return


def _cannot(name: str, error: OSError | ValueError) -> UsageError:
    return UsageError(f"cannot write {name}: {_reason(error)}")


def _reason(error: OSError | ValueError) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
