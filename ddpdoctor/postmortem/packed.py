"""Unpacks what logs are packed in: gzip, bzip2, xz and, where Python has it, zstd; tar and zip with all their files.

Everything is read from the front to the back and up to a bound: nothing is written, the directory at the end of a zip
archive, which may lie, is not asked, and no head may ask for memory.
"""

from __future__ import annotations

import bz2
import importlib
import io
import lzma
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

MOST_UNPACKED = 8 << 30
"""Bytes of one compressed log that are read; a bomb unpacks to more."""
LARGEST_RATIO = 600
"""A compressed log is 5 to 60 times smaller than what it holds; the most that deflate can do is about 1,030."""
LARGEST_INSIDE = 1 << 26
"""Bytes of a packed file in an archive, by which its bound is computed: the archive says less of it."""
MOST_MEMBERS = 5_000
"""Files of one archive."""
PIECE = 1 << 16
UNREAD = {b"7z\xbc\xaf": ("7z", "7z x"), b"Rar!": ("RAR", "unrar x"), b"\x04\x22\x4d\x18": ("lz4", "lz4 -d")}
"""First bytes of files that are not unpacked here, with their packer and the command that does."""
ZSTD = b"\x28\xb5\x2f\xfd"
_MOST_EMPTY_PARTS = 1_000
"""Of a file that was packed in parts, in a row; each costs 3 µs, and a bomb has nothing else."""
_LZMA_MEMORY = 1 << 28
"""Bytes of a dictionary; ``xz -9`` needs 65 MB."""
_ZIP_ENTRY = struct.Struct("<4s2xHH8xI4xHH")
"""Before an entry of a zip archive: signature, flags, method, packed size, lengths of name and extra fields."""
_ENCRYPTED, _SIZE_FOLLOWS = 1, 8
_STORED, _DEFLATED = 0, 8
_TAR_BLOCK = 512
_LONGEST_NAME = 1 << 16


def unpacked(stream: io.BufferedReader[Any], size: int) -> io.BufferedReader[Any]:
    """Return what a stream of ``size`` bytes holds where it is packed, otherwise the stream; raises OSError."""
    head = stream.peek(6)[:6]
    new: Callable[[], Any] | None = None
    if head[:2] == b"\x1f\x8b":
        new = lambda: zlib.decompressobj(zlib.MAX_WBITS | 16)  # noqa: E731
    elif head[:3] == b"BZh":
        new = bz2.BZ2Decompressor
    elif head == b"\xfd7zXZ\0":
        new = lambda: lzma.LZMADecompressor(memlimit=_LZMA_MEMORY)  # noqa: E731
    elif head[:4] == ZSTD:
        new = _zstd()
    return stream if new is None else io.BufferedReader(_Unpacked(stream, size, new), 1 << 20)


def _zstd() -> Callable[[], Any]:
    try:
        found: Callable[[], Any] = importlib.import_module("compression.zstd").ZstdDecompressor
    except ImportError as error:
        raise OSError("it is packed by zstd, which needs Python 3.14: unpack it first (`zstd -d FILE`)") from error
    return found


def is_archive(head: bytes) -> bool:
    """Return whether a file with these first 512 bytes is a tar or a zip archive."""
    return head[257:262] == b"ustar" or head[:4] in (b"PK\x03\x04", b"PK\x05\x06")


def members(stream: io.BufferedReader[Any], size: int) -> Iterator[tuple[str, io.BufferedReader[Any]]]:
    """Yield the files of an archive, each with a stream that is used up before the next is asked for."""
    if stream.peek(4)[:2] == b"PK":
        yield from _of_zip(_Source(stream), size)
    else:
        yield from _of_tar(stream)


def _of_tar(stream: io.BufferedReader[Any]) -> Iterator[tuple[str, io.BufferedReader[Any]]]:
    name = ""
    while (block := stream.read(_TAR_BLOCK)).strip(b"\0"):
        if len(block) < _TAR_BLOCK:
            raise EOFError("it is cut off")
        try:
            size = int(block[124:136].strip(b"\0 ") or b"0", 8)
        except ValueError as error:
            raise OSError("the archive is damaged") from error
        part = _Part(stream, size)
        kind = block[156:157]
        if kind in (b"L", b"x"):
            content = part.read(_LONGEST_NAME)
            name = _name_of(content) if kind == b"x" else content.rstrip(b"\0").decode("utf-8", "replace")
        elif kind in (b"0", b"\0", b"7"):
            short = block[345:500].rstrip(b"\0") + b"/" if block[257:263] == b"ustar\0" and block[345] else b""
            yield (
                name or (short + block[:100].rstrip(b"\0")).decode("utf-8", "replace"),
                io.BufferedReader(part, PIECE),
            )
            name = ""
        part.drain()
        stream.read(-size % _TAR_BLOCK)


def _name_of(fields: bytes) -> str:
    """Return the path among the fields of a head of POSIX; empty where it has none."""
    for line in fields.split(b"\n"):
        _, found, path = line.partition(b" path=")
        if found:
            return path.decode("utf-8", "replace")
    return ""


def _of_zip(source: _Source, size: int) -> Iterator[tuple[str, io.BufferedReader[Any]]]:
    first = True
    while len(head := source.read(_ZIP_ENTRY.size)) == _ZIP_ENTRY.size and head[:4] == b"PK\x03\x04":
        _, flags, method, packed, name_bytes, extra = _ZIP_ENTRY.unpack(head)
        follows = bool(flags & _SIZE_FOLLOWS)
        if flags & _ENCRYPTED or method not in (_STORED, _DEFLATED) or (method == _STORED and follows):
            raise OSError("the archive is encrypted, or packed in a way that is not read: unpack it first")
        name = source.read(name_bytes).decode("utf-8", "replace")
        source.read(extra)
        part = _Part(source, MOST_UNPACKED if follows else packed)
        inside = None
        if method == _DEFLATED:
            inside = _Unpacked(part, size, lambda: zlib.decompressobj(-zlib.MAX_WBITS), alone=True)
        if not name.endswith("/"):
            yield name, io.BufferedReader(part if inside is None else inside, 1 << 20)
        if inside is not None:
            inside.drain()
        if follows and inside is not None:
            source.unread(inside.left)
            _skip_sizes(source)
        else:
            part.drain()
        first = False
    if first and head[:4] != b"PK\x05\x06":
        raise EOFError("the archive is cut off")


def _skip_sizes(source: _Source) -> None:
    """Skip what follows an entry whose size was not known before it: a signature, a sum, two sizes of 4 or 8 bytes."""
    start = source.read(4)
    source.read(12 if start == b"PK\x07\x08" else 8)
    following = source.read(4)
    if following[:2] != b"PK":
        source.read(4)
        following = source.read(4) if start == b"PK\x07\x08" else following
    source.unread(following)


class _Source:
    """A stream to which bytes can be given back."""

    def __init__(self, stream: io.BufferedReader[Any]) -> None:
        self._stream, self._back = stream, b""

    def read(self, size: int) -> bytes:
        """Read so many bytes, fewer at the end."""
        piece, self._back = self._back[:size], self._back[size:]
        return piece if len(piece) == size else piece + self._stream.read(size - len(piece))

    def unread(self, piece: bytes) -> None:
        """Give back what was read last."""
        self._back = piece + self._back


class Raw(io.RawIOBase):
    """What is read piece by piece."""

    def readable(self) -> bool:
        """Return whether it is."""
        return True

    def drain(self) -> None:
        """Read what is left."""
        while self.read(1 << 20):
            pass


class _Part(Raw):
    """So many of the next bytes of a stream."""

    def __init__(self, stream: io.BufferedReader[Any] | _Source, left: int) -> None:
        self._stream, self._left = stream, left

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Read what is there, or raise EOFError where the archive ends before."""
        piece = self._stream.read(min(len(buffer), self._left))
        if self._left and not piece:
            raise EOFError("it is cut off")
        self._left -= len(piece)
        buffer[: len(piece)] = piece
        return len(piece)


class _Unpacked(Raw):
    """What a compressed stream holds, up to a bound: beyond it the file is no log."""

    def __init__(
        self, stream: io.BufferedReader[Any] | _Part, packed: int, new: Callable[[], Any], *, alone: bool = False
    ) -> None:
        """``new`` makes a decompressor of one part; ``alone``: nothing of this stream follows the first."""
        self._stream, self._new, self._alone = stream, new, alone
        self._bound = min(MOST_UNPACKED, max(packed * LARGEST_RATIO, 1 << 26))
        self._part = new()
        self.left = b""
        """Of the packed bytes, what is read and not unpacked."""
        self._read = self._read_before = self._empty_parts = 0

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Read, or raise OSError at the bound or for a damaged file, and EOFError where it is cut off."""
        piece = b""
        while not piece:
            if self._part.eof and not self._begins_another():
                return 0
            try:
                piece = self._some(len(buffer))
            except (zlib.error, lzma.LZMAError, ValueError) as error:
                raise OSError(f"it is damaged ({error})") from error
        self._read += len(piece)
        if self._read > self._bound:
            raise OSError(f"it unpacks to more than {self._bound >> 20:,} MiB, too large for a log")
        buffer[: len(piece)] = piece
        return len(piece)

    def _some(self, most: int) -> bytes:
        """Unpack a piece; it may be empty."""
        part = self._part
        # Those of bz2 and lzma keep what they have not unpacked, that of zlib gives it back.
        keeps = hasattr(part, "needs_input")
        if not self.left and (not keeps or part.needs_input):
            self.left = self._stream.read(PIECE) or b""
            if not self.left:
                raise EOFError("it is cut off")
        piece: bytes = part.decompress(self.left, most)
        self.left = part.unused_data if part.eof else b"" if keeps else part.unconsumed_tail
        return piece

    def _begins_another(self) -> bool:
        """Return whether another part follows the one that has ended; between them there may be zeros."""
        if self._alone:
            return False
        self.left = (self.left or self._stream.read(PIECE) or b"").lstrip(b"\0")
        if not self.left:
            return False
        self._empty_parts = 0 if self._read > self._read_before else self._empty_parts + 1
        if self._empty_parts > _MOST_EMPTY_PARTS:
            raise OSError("it consists of empty parts, as only a bomb does")
        self._read_before, self._part = self._read, self._new()
        return True


class Encoded(Raw):
    """A text as a stream of UTF-8."""

    def __init__(self, text: io.TextIOWrapper) -> None:
        self._text, self._left = text, b""

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Read and encode."""
        if not self._left:
            self._left = self._text.read(1 << 16).encode()
        size = min(len(buffer), len(self._left))
        buffer[:size], self._left = self._left[:size], self._left[size:]
        return size
