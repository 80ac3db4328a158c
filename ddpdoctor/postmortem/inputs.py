"""Finds what there is to be read under the paths that the user names, and opens it: nothing that is found may do harm.

Bounds: files of a directory or an archive, bytes of a compressed file, the time that is waited for a pipe.
"""

from __future__ import annotations

import io
import os
import re
import select
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec

from ddpdoctor.files.untrusted import open_untrusted, reason_of
from ddpdoctor.postmortem import packed
from ddpdoctor.postmortem.dumps.nccl_reports import REPORT
from ddpdoctor.record.layout import JOB_FILE

InputKind = Literal["log", "dump", "error-file", "run", "core"]
MOST_FILES = 20_000
"""Of one directory; a job of thousands of ranks has a few files a rank."""
PIPE_PATIENCE_S = 5.0
SNIFFED = 1 << 16
LARGEST_ERROR_FILE = 4 << 20
_NOTES_SHOWN = 8
_SKIPPED_SUFFIXES = frozenset(
    {
        ".pt", ".pth", ".ckpt", ".safetensors", ".bin", ".so", ".pyc", ".py", ".png", ".jpg", ".svg", ".parquet",
        ".arrow",        ".npy", ".npz", ".h5", ".onnx", ".toml", ".yaml", ".yml", ".sqlite", ".db",
    }
)  # fmt: skip
"""Files that lie beside logs and are none."""
_ZIPS = frozenset({".zip", ".gz", ".log", ".txt"})
"""Suffixes of zip archives that hold logs: checkpoints are zip archives as well."""
_ATTEMPT = re.compile(r"(?:^|/)attempt_(?P<attempt>\d+)/(?P<local>\d+)/(?:stdout|stderr|error)")
_RANK_IN_NAME = re.compile(
    r"(?:^|[^a-z])(?:global_?)?(?:rank|task|proc|worker|r)[-_.=]?(?P<rank>\d{1,6})(?:[^\d]|$)", re.IGNORECASE
)
_HOST_IN_NAME = re.compile(r"(?:^|[^a-z])(?P<host>(?:node|host|gpu|worker)[-_]?[a-z]*\d+)(?=[^\w]|_|$)", re.IGNORECASE)


class Found(msgspec.Struct, kw_only=True):
    """One thing to be read."""

    path: Path | None
    """None for stdin."""
    name: str
    """Its name in messages."""
    kind: InputKind
    rank: int | None = None
    by_launcher: bool = False
    """The rank is the name of a directory that torchrun made."""
    host: str = ""
    attempt: int = 0
    sample: bytes = b""
    archive: Archive | None = None
    """Where it is a file of an archive …"""
    place: int = 0
    """… the how manieth."""


class Inputs(msgspec.Struct, kw_only=True):
    """What was found, and in sentences what was left out."""

    found: list[Found] = []
    notes: list[str] = []


def find_inputs(paths: tuple[str, ...]) -> Inputs:
    """Look at every path; what cannot be read costs a sentence, never the rest."""
    inputs = Inputs()
    for name in paths:
        if name == "-":
            inputs.found.append(Found(path=None, name="stdin", kind="log"))
            continue
        path = Path(name)
        try:
            mode = path.stat().st_mode
        except OSError as error:
            inputs.notes.append(f"{name} cannot be read: {reason_of(error)}")
            continue
        if stat.S_ISDIR(mode):
            _add_directory(path, name, inputs)
        elif stat.S_ISREG(mode) or stat.S_ISFIFO(mode):
            _add_file(path, name, inputs, named=True)
        else:
            inputs.notes.append(f"{name} is not a file, directory or pipe: skipped")
    return inputs


def _add_directory(directory: Path, name: str, inputs: Inputs) -> None:
    if os.path.lexists(directory / JOB_FILE):
        inputs.found.append(Found(path=directory, name=name, kind="run"))
        return
    number = 0
    skipped: list[str] = []
    for path, problem in _files_under(directory):
        number += 1
        if number > MOST_FILES:
            inputs.notes.append(
                f"{name} holds more than {MOST_FILES:,} files: the rest was skipped; give the directory of one job"
            )
            break
        if problem:
            skipped.append(f"{path} was skipped: {problem}")
        elif path.name == JOB_FILE:
            inputs.found.append(Found(path=path.parent, name=str(path.parent), kind="run"))
        else:
            _add_file(path, str(path), inputs, named=False)
    inputs.notes += skipped[:_NOTES_SHOWN]
    if len(skipped) > _NOTES_SHOWN:
        inputs.notes.append(f"{len(skipped) - _NOTES_SHOWN:,} more files of {name} were skipped")
    if not number:
        inputs.notes.append(f"{name} holds no file")


def _files_under(directory: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files in the order of their names, each with why it is not read; of its own directory only."""
    for root, folders, files in os.walk(directory):
        folders.sort()
        for folder in folders:
            if os.path.islink(path := Path(root, folder)):
                yield path, "it is a link to a directory"
        for file in sorted(files):
            path = Path(root, file)
            if path.suffix.lower() in _SKIPPED_SUFFIXES:
                continue
            try:
                os.close(open_untrusted(path, directory))
            except OSError as error:
                yield path, reason_of(error)
            else:
                yield path, ""


def _add_file(path: Path, name: str, inputs: Inputs, *, named: bool) -> None:
    """Look at the beginning of a file; of a pipe nothing is read yet."""
    if path.is_fifo():
        inputs.found.append(_placed(path, path, name))
        return
    try:
        with _unpacked_file(path) as stream:
            head = stream.peek(512)[:512]
        archived = packed.is_archive(head) and (head[:2] != b"PK" or path.suffix.lower() in _ZIPS)
        if archived:
            _add_archive(path, name, inputs)
        else:
            _add_log(_placed(path, path, name), path, inputs, named=named)
    except (OSError, EOFError) as error:
        inputs.notes.append(f"{name} cannot be read: {reason_of(error)}")


def _add_archive(path: Path, name: str, inputs: Inputs) -> None:
    archive = Archive(path)
    number = 0
    try:
        for number, member in enumerate(archive.names(), 1):
            if number > packed.MOST_MEMBERS:
                inputs.notes.append(f"{name} holds more than {packed.MOST_MEMBERS:,} files: the rest was skipped")
                return
            inside = Path(member)
            if inside.suffix.lower() not in _SKIPPED_SUFFIXES:
                found = _placed(path, inside, f"{name}/{member}")
                found.archive, found.place = archive, number - 1
                _add_log(found, inside, inputs, named=False)
    except (OSError, EOFError) as error:
        if not number:
            raise
        inputs.notes.append(f"{name} cannot be read to its end: {reason_of(error)}")
        archive.is_damaged = True
    if not number:
        raise OSError("the archive is empty")


def _placed(path: Path, inside: Path, name: str) -> Found:
    """Return what a file's name says of it; ``inside`` is its name in an archive."""
    attempt = _ATTEMPT.search(inside.as_posix())
    rank = _RANK_IN_NAME.search(inside.name)
    host = _HOST_IN_NAME.search(inside.name)
    return Found(
        path=path,
        name=name,
        kind="log",
        rank=int(attempt["local"]) if attempt else int(rank["rank"]) if rank else None,
        by_launcher=attempt is not None,
        attempt=int(attempt["attempt"]) if attempt else 0,
        host=host["host"] if host else "",
    )


def _add_log(found: Found, path: Path, inputs: Inputs, *, named: bool) -> None:
    with opened(found) as stream:
        found.sample = stream.read(SNIFFED)
    if not found.sample:
        if named:
            inputs.notes.append(f"{found.name} is empty")
        return
    packer, command = next((how for start, how in packed.UNREAD.items() if found.sample.startswith(start)), ("", ""))
    kind = _kind_of(found.sample, path)
    if packer:
        inputs.notes.append(f"{found.name} was skipped: it is packed by {packer}; unpack it first (`{command} FILE`)")
    elif kind is not None:
        found.kind = kind
        inputs.found.append(found)
    elif named:
        inputs.notes.append(f"{found.name} is neither text nor a flight-recorder dump: skipped")


def _kind_of(sample: bytes, path: Path) -> InputKind | None:
    start = sample.lstrip()[:400]
    if sample.startswith(b"\x7fELF") and b"\x04" in sample[16:18]:
        return "core"
    if sample[:1] == b"\x80" and len(sample) > 1 and sample[1] <= 5:
        return "dump"
    if start.startswith(b"{"):
        if b'"py_callstack"' in sample or (b'"message"' in start and path.name.startswith("error")):
            return "error-file"
        if re.search(rb'"(?:version|entries|pg_config|pg_status|rank|host_name)"\s*:', start) and (
            b'"pg_config"' in sample or b'"entries"' in sample
        ):
            return "dump"
        if REPORT.match(sample) and re.search(rb'"(?:communicators|inspector_output_format_version)"', sample):
            return "dump"
    if sample[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "log"
    odd = sum(byte < 9 or 13 < byte < 27 or 27 < byte < 32 for byte in sample[:4_096])
    return None if odd > 0.05 * len(sample[:4_096]) else "log"


class Archive:
    """The files of a tar or zip archive; an earlier one than the last costs a new start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.is_damaged = False
        """It is known that it cannot be read to its end."""
        self._taken = False
        self._restart()

    def names(self) -> Iterator[str]:
        """Yield the names of the files; the content of each can be taken until the next is asked for."""
        self._restart()
        while self._advance():
            yield self._name

    def take(self, place: int) -> io.BufferedReader[Any]:
        """Return the content of a file, from its beginning."""
        if place < self._place or (place == self._place and self._taken):
            self._restart()
        while self._place < place:
            if not self._advance():
                raise OSError("the archive has changed")
        self._taken = True
        return self._content

    def _restart(self) -> None:
        self._members, self._place = self._walk(), -1
        self._taken = False

    def _advance(self) -> bool:
        found = next(self._members, None)
        if found is None:
            return False
        self._name, self._content = found
        self._place, self._taken = self._place + 1, False
        return True

    def _walk(self) -> Iterator[tuple[str, io.BufferedReader[Any]]]:
        with _unpacked_file(self._path) as stream:
            yield from packed.members(stream, self._path.stat().st_size)


@contextmanager
def _unpacked_file(path: Path) -> Iterator[io.BufferedReader[Any]]:
    with os.fdopen(open_untrusted(path), "rb") as stream:
        yield packed.unpacked(stream, os.fstat(stream.fileno()).st_size)


@contextmanager
def opened(found: Found, stdin: BinaryIO | None = None) -> Iterator[io.BufferedReader[Any]]:
    """Open a file, a pipe or stdin as a stream of plain bytes, unpacked and in UTF-8; raises OSError and EOFError."""
    with ExitStack() as stack:
        if found.archive is not None:
            content = found.archive.take(found.place)
            stream = packed.unpacked(content, packed.LARGEST_INSIDE)
        elif found.path is None or found.path.is_fifo():
            raw = stack.enter_context(_Unclosed(stdin) if found.path is None else _open_pipe(found.path))
            stream = packed.unpacked(io.BufferedReader(raw, SNIFFED), packed.MOST_UNPACKED)
        else:
            stream = stack.enter_context(_unpacked_file(found.path))
        if stream.peek(2)[:2] in (b"\xff\xfe", b"\xfe\xff"):
            text = stack.enter_context(io.TextIOWrapper(stream, encoding="utf-16", errors="replace", newline=""))
            stream = io.BufferedReader(packed.Encoded(text), SNIFFED)
        yield stream


class _Unclosed(packed.Raw):
    """The standard input, which stays open."""

    def __init__(self, stream: BinaryIO | None) -> None:
        self._stream = stream

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Read what is there."""
        piece = b"" if self._stream is None else self._stream.read(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)


def _open_pipe(path: Path) -> io.RawIOBase:
    """Open a pipe that someone writes to; raises OSError where no one does."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN | select.POLLHUP)
    ready = poll.poll(PIPE_PATIENCE_S * 1_000)
    if not ready or not ready[0][1] & select.POLLIN:
        os.close(descriptor)
        raise OSError("it is a pipe without a writer")
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "rb", buffering=0)
