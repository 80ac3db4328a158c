"""Finds what there is to be read under the paths that the user names, and opens it: nothing that is found may do harm.

Bounds: files of a directory, bytes of a compressed file, the time that is waited for a pipe.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import select
import stat
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal, cast

import msgspec

from ddpdoctor.record.layout import JOB_FILE

InputKind = Literal["log", "dump", "error-file", "run"]
MOST_FILES = 20_000
"""Of one directory; a job of thousands of ranks has a few files a rank."""
MOST_UNPACKED = 8 << 30
"""Bytes of one compressed log that are read; a bomb unpacks to more."""
LARGEST_RATIO = 600
"""A compressed log is 5 to 60 times smaller than what it holds; the most that deflate can do is about 1,030."""
PIPE_PATIENCE_S = 10.0
SNIFFED = 1 << 16
LARGEST_ERROR_FILE = 16 << 20
_SKIPPED_SUFFIXES = frozenset(
    {
        ".pt", ".pth", ".ckpt", ".safetensors", ".bin", ".so", ".pyc", ".py", ".png", ".jpg", ".svg", ".parquet",
        ".arrow",        ".npy", ".npz", ".h5", ".onnx", ".toml", ".yaml", ".yml", ".sqlite", ".db",
    }
)  # fmt: skip
"""Files that lie beside logs and are none."""
_ARCHIVES = frozenset({".zip", ".gz", ".log", ".txt"})
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
            inputs.notes.append(f"{name} cannot be read: {error.strerror or error}")
            continue
        if stat.S_ISDIR(mode):
            _add_directory(path, name, inputs)
        elif stat.S_ISREG(mode) or stat.S_ISFIFO(mode):
            _add_file(path, name, inputs, named=True)
        else:
            inputs.notes.append(f"{name} is not a file, directory or pipe: skipped")
    return inputs


def _add_directory(directory: Path, name: str, inputs: Inputs) -> None:
    if (directory / JOB_FILE).is_file():
        inputs.found.append(Found(path=directory, name=name, kind="run"))
        return
    number = 0
    for path in _files_under(directory):
        number += 1
        if number > MOST_FILES:
            inputs.notes.append(
                f"{name} holds more than {MOST_FILES:,} files: the rest was skipped; give the directory of one job"
            )
            return
        if path.name == JOB_FILE:
            inputs.found.append(Found(path=path.parent, name=str(path.parent), kind="run"))
        elif path.suffix.lower() not in _SKIPPED_SUFFIXES:
            _add_file(path, str(path), inputs, named=False)
    if not number:
        inputs.notes.append(f"{name} holds no file")


def _files_under(directory: Path) -> Iterator[Path]:
    """Regular files, in the order of their names; links to directories are not followed."""
    for root, folders, files in os.walk(directory):
        folders.sort()
        for file in sorted(files):
            path = Path(root, file)
            try:
                if stat.S_ISREG(path.stat().st_mode):
                    yield path
            except OSError:
                continue


def _add_file(path: Path, name: str, inputs: Inputs, *, named: bool) -> None:
    """Look at the beginning of a file; of a pipe nothing is read yet."""
    attempt = _ATTEMPT.search(path.as_posix())
    rank = _RANK_IN_NAME.search(path.name)
    host = _HOST_IN_NAME.search(path.name)
    found = Found(
        path=path,
        name=name,
        kind="log",
        rank=int(attempt["local"]) if attempt else int(rank["rank"]) if rank else None,
        by_launcher=attempt is not None,
        attempt=int(attempt["attempt"]) if attempt else 0,
        host=host["host"] if host else "",
    )
    if path.is_fifo():
        inputs.found.append(found)
        return
    try:
        with opened(found) as stream:
            found.sample = stream.read(SNIFFED)
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        inputs.notes.append(f"{name} cannot be read: {_why(error)}")
        return
    if not found.sample:
        if named:
            inputs.notes.append(f"{name} is empty")
        return
    kind = _kind_of(found.sample, path)
    if kind is None:
        if named:
            inputs.notes.append(f"{name} is neither text nor a flight-recorder dump: skipped")
        return
    found.kind = kind
    inputs.found.append(found)


def _kind_of(sample: bytes, path: Path) -> InputKind | None:
    start = sample.lstrip()[:400]
    if sample[:1] == b"\x80" and len(sample) > 1 and sample[1] <= 5:
        return "dump"
    if start.startswith(b"{"):
        if b'"py_callstack"' in sample or (b'"message"' in start and path.name.startswith("error")):
            return "error-file"
        if re.search(rb'"(?:version|entries|pg_config|pg_status|rank|host_name)"\s*:', start) and (
            b'"pg_config"' in sample or b'"entries"' in sample
        ):
            return "dump"
    if sample[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "log"
    odd = sum(byte < 9 or 13 < byte < 27 or 27 < byte < 32 for byte in sample[:4_096])
    return None if odd > 0.05 * len(sample[:4_096]) else "log"


@contextmanager
def opened(found: Found, stdin: BinaryIO | None = None) -> Iterator[io.BufferedReader[Any]]:
    """Open a file, a pipe or stdin as a stream of plain bytes, unpacked and in UTF-8; raises OSError and its like."""
    with ExitStack() as stack:
        if found.path is None or found.path.is_fifo():
            raw = stack.enter_context(_Unclosed(stdin) if found.path is None else _open_pipe(found.path))
            stream: io.BufferedReader[Any] = io.BufferedReader(raw, SNIFFED)
            packed = MOST_UNPACKED // LARGEST_RATIO
        else:
            stream = stack.enter_context(found.path.open("rb"))
            packed = found.path.stat().st_size
        head = stream.peek(4)[:4]
        if head[:2] == b"\x1f\x8b":
            stream = _bounded(stack.enter_context(gzip.GzipFile(fileobj=stream)), packed)
        elif head == b"PK\x03\x04" and found.path is not None and found.path.suffix.lower() in _ARCHIVES:
            archive = stack.enter_context(zipfile.ZipFile(found.path))
            first = next(iter(archive.infolist()), None)
            if first is None:
                raise OSError("the archive is empty")
            stream = _bounded(stack.enter_context(archive.open(first)), packed)
        if stream.peek(2)[:2] in (b"\xff\xfe", b"\xfe\xff"):
            text = stack.enter_context(io.TextIOWrapper(stream, encoding="utf-16", errors="replace", newline=""))
            stream = io.BufferedReader(_Encoded(text), SNIFFED)
        yield stream


def _bounded(stream: object, packed: int) -> io.BufferedReader[Any]:
    return io.BufferedReader(_Bounded(cast("IO[bytes]", stream), packed), 1 << 20)


class _Unclosed(io.RawIOBase):
    """The standard input, which stays open."""

    def __init__(self, stream: BinaryIO | None) -> None:
        self._stream = stream

    def readable(self) -> bool:
        """Return whether it is."""
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Read what is there."""
        piece = b"" if self._stream is None else self._stream.read(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)


class _Bounded(io.RawIOBase):
    """What a compressed file holds, up to a bound: beyond it the file is no log."""

    def __init__(self, stream: IO[bytes], packed: int) -> None:
        self._stream, self._bound = stream, min(MOST_UNPACKED, max(packed * LARGEST_RATIO, 1 << 26))
        self._read = 0

    def readable(self) -> bool:
        """Return whether it is."""
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Read, or raise OSError at the bound."""
        piece = self._stream.read(len(buffer))
        self._read += len(piece)
        if self._read > self._bound:
            raise OSError(f"it unpacks to more than {self._bound >> 20:,} MiB, too large for a log")
        buffer[: len(piece)] = piece
        return len(piece)


class _Encoded(io.RawIOBase):
    """A text as a stream of UTF-8."""

    def __init__(self, text: io.TextIOWrapper) -> None:
        self._text, self._left = text, b""

    def readable(self) -> bool:
        """Return whether it is."""
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Read and encode."""
        if not self._left:
            self._left = self._text.read(1 << 16).encode()
        size = min(len(buffer), len(self._left))
        buffer[:size], self._left = self._left[:size], self._left[size:]
        return size


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


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
