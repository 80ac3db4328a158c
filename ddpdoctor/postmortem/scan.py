"""Finds the few lines of a log that report a failure, in gigabytes of those that do not.

Substrings are searched in whole pieces of the log (1.6 GB/s each, against 0.08 GB/s of one compiled alternation and
0.45 GB/s of splitting alone): only lines that hold one of them, and those that a reader asks for after them, cost a
Python step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO, Literal

PIECE_BYTES = 1 << 20
LONGEST_LINE = 1 << 20
"""A longer line, as progress bars write them that never end a line, is cut."""
MOST_ALIKE = 2_000
"""A line without information so often, whatever its numbers were, costs a look into a dictionary from then on (1.5 µs
against 13): jobs repeat a harmless error for days, and die of another one."""
MOST_KINDS = 20_000
MOST_TAKEN = 120_000
"""Other lines of interest of one log, which take a reader up to 10 s; then only the end of the log is read."""
END_BYTES = 1 << 21
"""So much of it, in which there are lines of interest again up to that number."""
MOST_DULL = 2_000_000
"""Lines that are left out so before the rest of the log is: only a bomb holds as many."""
TAIL_BYTES = 1 << 16
_DIGITS = b"0123456789"
_ALIKE_BYTES = 200
NEEDLES = (
    b"Error",
    b"error:",
    b"us error",
    b"raceback (most",
    b".cpp:",
    b"illed",
    b"ignal",
    b"exitcode",
    b"(local_rank:",
    b"*** SIG",
    b"NCCL WARN",
    b"Xid",
    b"terminate",
    b"gmentation fault",
    b"segfault",
    b"core dumped",
    b"return code",
    b'", line ',
    b"exited with",
    b"xit Code",
    b"noticed that",
    b"what()",
    b"ERROR",
    b"CRITICAL",
    b"FATAL",
    b"Exception:",
    b"imed out waiting",
    b"not receive grad",
    b"application crash",
    b"issing ranks",
    b"uplicate GPU",
    b"ready twice",
    b"remainder of ranks",
    b"orker died",
    b"device handle",
    b"] Assertion `",
    b"encountered in worker",
)
"""Every line that reports a failure holds one of them, or follows one that does."""


Heed = Literal["nothing", "something", "more"]
"""What a reader made of a line; ``more``: it needs the next one as well."""


class Scanner:
    """Hands the lines of interest of one log to a reader."""

    def __init__(self, take: Callable[[bytes, int], Heed], note_context: Callable[[bytes], None]) -> None:
        """``take`` gets a line and its number from 1, and says what it made of it.

        ``note_context`` gets what stands before a line of interest that does not follow another one.
        """
        self._take = take
        self._note_context = note_context
        self._rest = b""
        self._lines = 0
        """Lines before what is searched."""
        self._wants_next = False
        self._tail = b""
        self._taken = self._left_out = 0
        self.skipped: tuple[int, int] | None = None
        """The first and the last line of those that were left out."""
        self._dull: dict[bytes, int] = {}
        """How often a line was of no interest, by the line without its digits."""

    def count_parts(self, number: int) -> None:
        """Count a line as so many: it holds as many."""
        self._taken += number - 1

    @property
    def is_full(self) -> bool:
        """There were so many lines of interest that the rest was left out."""
        return self._taken >= MOST_TAKEN or self._left_out >= MOST_DULL

    @property
    def lines(self) -> int:
        """How many lines were read."""
        return self._lines

    @property
    def tail(self) -> tuple[bytes, int]:
        """The last piece of the log and the number of its first line; empty where the rest was left out."""
        return (b"", 0) if self.is_full else (self._tail, self._lines - self._tail.count(b"\n") + 1)

    def read(self, stream: BinaryIO) -> None:
        """Read a stream to its end; memory stays at a few pieces."""
        piece = stream.read(PIECE_BYTES)
        while piece and not self.is_full:
            following = stream.read(PIECE_BYTES)
            self._feed(piece, last=not following)
            piece = following
        if self.is_full:
            self._skip_to_end(stream, piece)
        if self._rest and not self.is_full:
            rest, self._rest = self._rest, b""
            self._search(rest + b"\n", last=True)

    def _skip_to_end(self, stream: BinaryIO, piece: bytes) -> None:
        """Leave out the rest but for its end: a job may repeat errors for days, and die of another one."""
        before, end = self._lines, self._rest
        while True:
            end += piece
            if len(end) > END_BYTES:
                cut = end.find(b"\n", len(end) - END_BYTES) + 1 or len(end)
                self._lines += end.count(b"\n", 0, cut)
                end = end[cut:]
            if not (piece := stream.read(PIECE_BYTES)):
                break
        self._rest, self._tail, self._wants_next = end, b"", False
        self._taken = self._left_out = 0
        if self._lines > before:
            self.skipped = (before + 1, self._lines)

    def _feed(self, piece: bytes, *, last: bool) -> None:
        text = self._rest + piece if self._rest else piece
        end = text.rfind(b"\n") + 1
        if not end and len(text) > LONGEST_LINE:
            end = text.rfind(b"\r") + 1 or len(text)
        self._rest = text[end:]
        if end:
            self._search(text[:end], last=last)

    def _heed(self, line: bytes, *, follows: bool) -> Heed:
        """Hand on a line unless so many of its kind were of no interest; return what the reader made of it."""
        kind = line[:_ALIKE_BYTES].translate(None, _DIGITS)
        known = self._dull.get(kind, 0)
        if known >= MOST_ALIKE and not follows:
            self._left_out += 1
            return "nothing"
        self._taken += 1
        heed = self._take(line, self._lines)
        if heed == "nothing" and (known or len(self._dull) < MOST_KINDS):
            self._dull[kind] = known + 1
        return heed

    def _search(self, text: bytes, *, last: bool) -> None:
        tail = self._tail[-TAIL_BYTES:] + text[-TAIL_BYTES:]
        whole = len(tail) == len(self._tail) + len(text)
        # Of the first line the beginning may be missing.
        self._tail = tail if whole else tail[tail.find(b"\n") + 1 or len(tail) :]
        nearest = [text.find(needle) for needle in NEEDLES]
        # The end of the log is read line by line: there it may say in any words why it ends.
        every = text.rfind(b"\n", 0, max(0, len(text) - TAIL_BYTES)) + 1 if last else len(text)
        position = quiet = 0
        while position < len(text) and not self.is_full:
            hit = min((found for found in nearest if found >= 0), default=len(text))
            start = position
            if not self._wants_next:
                start = text.rfind(b"\n", position, hit) + 1 or position if hit < len(text) else hit
                start = min(start, max(position, every))
                if start == len(text):
                    break
                self._lines += text.count(b"\n", position, start)
            end = text.find(b"\n", start)
            end = len(text) if end < 0 else end
            if self._wants_next or hit < end:
                if start > quiet:
                    self._note_context(text[max(quiet, start - 4_096) : start])
                quiet = end + 1
            self._lines += 1
            heed = self._heed(text[start:end], follows=self._wants_next)
            self._wants_next = heed == "more"
            if heed != "nothing" and start > quiet:
                self._note_context(text[max(quiet, start - 4_096) : start])
                quiet = end + 1
            position = end + 1
            nearest = [
                found if found < 0 or found >= position else text.find(needle, position)
                for needle, found in zip(NEEDLES, nearest, strict=True)
            ]
        if self.is_full:
            self._rest = text[position:] + self._rest
        else:
            self._lines += text.count(b"\n", min(position, len(text)))
