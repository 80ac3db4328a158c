"""Finds what there is to be read under the paths that the user names, and opens it: nothing that is found may do harm.

Bounds: files of a directory, bytes of a compressed file, the time that is waited for a pipe.
"""

from __future__ import annotations

import io
import os
import re
import select
import stat
import struct
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec

from ddpdoctor.files.untrusted import open_untrusted, reason_of
from ddpdoctor.record.layout import JOB_FILE

InputKind = Literal["log", "dump", "error-file", "run"]
MOST_FILES = 20_000
"""Of one directory; a job of thousands of ranks has a few files a rank."""
MOST_UNPACKED = 8 << 30
"""Bytes of one compressed log that are read; a bomb unpacks to more."""
LARGEST_RATIO = 600
"""A compressed log is 5 to 60 times smaller than what it holds; the most that deflate can do is about 1,030."""
PIPE_PATIENCE_S = 5.0
SNIFFED = 1 << 16
LARGEST_ERROR_FILE = 4 << 20
_NOTES_SHOWN = 8
_MOST_EMPTY_PARTS = 1_000
"""Of a file that gzip wrote in parts, in a row; each costs 3 µs, and a bomb has nothing else."""
_PACKED = {
    b"\xfd7zXZ\0": "xz",
    b"BZh": "bzip2",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"7z\xbc\xaf": "7z",
    b"Rar!": "RAR",
    b"\x04\x22\x4d\x18": "lz4",
}
"""First bytes of files that are not unpacked."""
_ZIP_ENTRY = struct.Struct("<4s2xHH8xI4xHH")
"""Before the first entry of a zip archive: signature, flags, method, packed size, lengths of name and extra fields."""
_ENCRYPTED, _SIZE_FOLLOWS = 1, 8
_STORED, _DEFLATED = 0, 8
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
    except (OSError, EOFError, zlib.error) as error:
        inputs.notes.append(f"{name} cannot be read: {reason_of(error)}")
        return
    if not found.sample:
        if named:
            inputs.notes.append(f"{name} is empty")
        return
    kind = _kind_of(found.sample, path)
    packer = next((packer for start, packer in _PACKED.items() if found.sample.startswith(start)), "")
    if packer:
        inputs.notes.append(f"{name} was skipped: it is packed by {packer}, and has to be unpacked first")
        return
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
            stream = stack.enter_context(os.fdopen(open_untrusted(found.path), "rb"))
            packed = os.fstat(stream.fileno()).st_size
        head = stream.peek(4)[:4]
        is_archive = found.path is not None and found.path.suffix.lower() in _ARCHIVES
        if head[:2] == b"\x1f\x8b":
            stream = io.BufferedReader(_Unpacked(stream, packed, zlib.MAX_WBITS | 16), 1 << 20)
        elif head == b"PK\x03\x04" and is_archive:
            stream = _first_of_archive(stream, packed)
        elif head == b"PK\x05\x06" and is_archive:
            raise OSError("the archive is empty")
        if stream.peek(2)[:2] in (b"\xff\xfe", b"\xfe\xff"):
            text = stack.enter_context(io.TextIOWrapper(stream, encoding="utf-16", errors="replace", newline=""))
            stream = io.BufferedReader(_Encoded(text), SNIFFED)
        yield stream


def _first_of_archive(stream: io.BufferedReader[Any], packed: int) -> io.BufferedReader[Any]:
    """Return the first file of a zip archive, as it lies behind its own head: the directory at the end may lie."""
    head = stream.read(_ZIP_ENTRY.size)
    if len(head) < _ZIP_ENTRY.size:
        raise EOFError("the archive is cut off")
    _, flags, method, size, name, extra = _ZIP_ENTRY.unpack(head)
    stored = method == _STORED and not flags & _SIZE_FOLLOWS
    if flags & _ENCRYPTED or not (stored or method == _DEFLATED):
        raise OSError("the archive is encrypted, or packed in a way that is not read: unpack it first")
    stream.read(name + extra)
    if stored:
        return io.BufferedReader(_Part(stream, size), SNIFFED)
    return io.BufferedReader(_Unpacked(stream, packed, -zlib.MAX_WBITS), 1 << 20)


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


class _Part(io.RawIOBase):
    """So many of the next bytes of a stream."""

    def __init__(self, stream: io.BufferedReader[Any], left: int) -> None:
        self._stream, self._left = stream, left

    def readable(self) -> bool:
        """Return whether it is."""
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Read what is there."""
        piece = self._stream.read(min(len(buffer), self._left))
        self._left -= len(piece)
        buffer[: len(piece)] = piece
        return len(piece)


class _Unpacked(io.RawIOBase):
    """What a compressed file holds, up to a bound: beyond it the file is no log."""

    def __init__(self, stream: io.BufferedReader[Any], packed: int, window_bits: int) -> None:
        """``window_bits`` says to zlib what surrounds the content; a negative one is for one part without a frame."""
        self._stream, self._window_bits = stream, window_bits
        self._bound = min(MOST_UNPACKED, max(packed * LARGEST_RATIO, 1 << 26))
        self._part = zlib.decompressobj(window_bits)
        self._left = b""
        """Of the packed bytes, what is read and not unpacked."""
        self._read = self._read_before = self._empty_parts = 0

    def readable(self) -> bool:
        """Return whether it is."""
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Read, or raise OSError at the bound, EOFError where the file is cut off, and zlib.error for a damaged one."""
        piece = b""
        while not piece:
            if self._part.eof and not self._begins_another():
                return 0
            self._left = self._left or self._stream.read(SNIFFED)
            if not self._left:
                raise EOFError("it is cut off")
            piece = self._part.decompress(self._left, len(buffer))
            self._left = self._part.unused_data if self._part.eof else self._part.unconsumed_tail
        self._read += len(piece)
        if self._read > self._bound:
            raise OSError(f"it unpacks to more than {self._bound >> 20:,} MiB, too large for a log")
        buffer[: len(piece)] = piece
        return len(piece)

    def _begins_another(self) -> bool:
        """Return whether another part follows the one that has ended; between them there may be zeros."""
        self._left = (self._left or self._stream.read(SNIFFED)).lstrip(b"\0")
        if not self._left or self._window_bits < 0:
            return False
        self._empty_parts = 0 if self._read > self._read_before else self._empty_parts + 1
        if self._empty_parts > _MOST_EMPTY_PARTS:
            raise OSError("it consists of empty parts, as only a bomb does")
        self._read_before, self._part = self._read, zlib.decompressobj(self._window_bits)
        return True


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
