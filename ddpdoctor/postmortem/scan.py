"""Finds the few lines of a log that report a failure, in gigabytes of those that do not.

Substrings are searched in what a piece of the log says that no piece before it said (1.6 s for a GB to find that out;
23 s to search for all of them everywhere): only lines that hold one of them, and those that a reader asks for after
them, cost a Python step.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import BinaryIO, Literal, cast

PIECE_BYTES = 1 << 20
LONGEST_LINE = 1 << 20
"""A longer line, as progress bars write them that never end a line, is cut."""
MOST_TAKEN = 50_000
"""Lines of interest of one log that are read one by one, which takes up to 5 s; from then on only those are that say
something new, with the traceback that they stand in: jobs repeat an error for days, and die of another one."""
END_BYTES = 1 << 20
"""So much of the end of such a log is read one by one again."""
MOST_NEW, MOST_STRANGE = 30_000, 1_500_000
"""Lines that are read for saying something new (80 µs each), and that are looked at for it (4 µs); then the rest but
for the end is left out: only a bomb holds as many."""
MOST_KINDS, LONGEST_KIND = 200_000, 250
MOST_OF_A_PLACE = 20
"""So many different words of one class of error under one mark are read as new."""
MOST_CODES = 1_000
MOST_OF_A_TRACEBACK = 100
TAIL_BYTES = 1 << 16
_DIGITS = b"0123456789"
_CODES = {
    b"Xid": re.compile(rb"Xid[^\n]{0,60}: \d{1,3}\b"),
    b"ignal": re.compile(rb"ignal(?:s\.\w+)?[^\n\w]{1,8}\d{1,3}\b"),
    **{
        word: re.compile(word + rb"[^\n\w]{1,8}\d{1,3}\b")
        for word in (b"code", b"Code", b"status", b"STATUS", b"SIGNAL")
    },
}
"""Numbers that make one report another one: what rows of the catalogue and forms of launchers call a code or a signal
stands behind one of these words."""
_HEADER = b"raceback (most"
_FRAME = b'", line '
_MARK = re.compile(
    rb"(?:\d[-\d:.,TZ+]{7,}[ ,](?:[\d:.,]+ )?(?:std(?:err|out) [FP] )?)?(\[\w+\]:|\s*\d+: ?|)(.*)", re.DOTALL
)
"""A time, what marks the lines of one process, and what it wrote."""
_PLACE = re.compile(rb"\S*(?:rror|Exception|WARN|ERROR|CRITICAL|FATAL|\.cpp:)\S*(?: \S+)?")
_CHAINED = (b"The above exception was", b"During handling of the")
NEEDLES = (
    b"Error", b"error:", b"us error", b"raceback (most", b".cpp:", b"illed", b"ignal", b"exitcode", b"(local_rank:",
    b"*** SIG", b"NCCL WARN", b"Xid", b"terminate", b"gmentation fault", b"segfault", b"core dumped", b"return code",
    b'", line ', b"exited with", b"xit Code", b"noticed that", b"what()", b"ERROR", b"CRITICAL", b"FATAL",
    b"Exception:", b"imed out waiting", b"not receive grad", b"application crash", b"issing ranks", b"uplicate GPU",
    b"ready twice", b"remainder of ranks", b"orker died", b"device handle", b"] Assertion `", b"encountered in worker",
    b"NVRM:", b"fault by GPU", b" times out", b"heartbeat timeout", b"ain process exited", b"low on resource",
    b"Back-off", b"stuck in unint", b"Reaping worker", b"initialize NVML", b"command not found", b"can't open file",
    b"connect to host", b"ImagePull", b"status.FAILED", b" RUNNING AT ", b"ption ignored",
    b"Exception by GPU", b"meet rendezvous", b"oom-killer", b"MPI_ERR",
)  # fmt: skip
"""Every line that reports a failure holds one of them, or follows one that does."""


Heed = Literal["nothing", "something", "more"]
"""What a reader made of a line; ``more``: it needs the next one as well."""


class Scanner:
    """Hands the lines of interest of one log to a reader."""

    def __init__(
        self, take: Callable[[bytes, int], Heed], note_context: Callable[[bytes], None], leave: Callable[[], None]
    ) -> None:
        """``take`` gets a line and its number from 1, and says what it made of it.

        ``note_context`` gets what stands before a line of interest that does not follow another one, and ``leave`` is
        told where lines that may belong to the last one are left out.
        """
        self._take = take
        self._note_context = note_context
        self._leave = leave
        self._rest = b""
        self._lines = 0
        """Lines before what is searched."""
        self._wants_next = False
        self._tail = b""
        self._taken = self._strange = 0
        self.sifted: tuple[int, int] | None = None
        """The first and the last line of those of which only what is new was read …"""
        self.skipped: tuple[int, int] | None = None
        """… and of those that were left out."""
        self._kinds: set[bytes] = set()
        """What lines hold but digits: those without a needle, and all that were sifted."""
        self._patterns: set[re.Pattern[bytes]] = set()
        """Of the codes that such lines may have …"""
        self._codes: set[bytes] = set()
        """… and the codes that were read, with their words."""
        self._places: Counter[tuple[bytes, bytes]] = Counter()
        """How often one class of error had new words, by the mark in front of it."""

    def count_parts(self, number: int) -> None:
        """Count a line as so many: it holds as many."""
        self._taken += number - 1

    @property
    def is_full(self) -> bool:
        """There were so many lines of interest that no more are read one by one."""
        return self._taken >= MOST_TAKEN

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
            self._sift_to_end(stream, piece)
        if self._rest and not self.is_full:
            rest, self._rest = self._rest, b""
            self._search(rest + b"\n", last=True)

    def _sift_to_end(self, stream: BinaryIO, piece: bytes) -> None:
        """Read of the rest but for its end what is new."""
        before, end = self._lines, self._rest
        self._leave()
        self._taken = 0
        while True:
            end += piece
            if len(end) > END_BYTES:
                cut = end.find(b"\n", len(end) - END_BYTES) + 1 or len(end)
                if self._taken < MOST_NEW and self._strange < MOST_STRANGE:
                    self._sift(end[:cut])
                    self.sifted = (before + 1, self._lines)
                else:
                    first = self._lines + 1
                    self._lines += end.count(b"\n", 0, cut)
                    self.skipped = (self.skipped[0] if self.skipped else first, self._lines)
                end = end[cut:]
            if not (piece := stream.read(PIECE_BYTES)):
                break
        self._rest, self._tail, self._wants_next, self._taken, self._kinds = end, b"", False, 0, set()

    def _sift(self, text: bytes) -> None:
        """Hand on what is new in whole lines, with the tracebacks that it stands in."""
        lines, kinds = text.split(b"\n"), text.translate(None, _DIGITS).split(b"\n")
        known, read_to = self._kinds, dict[bytes, int]()
        strange = () if known.issuperset(kinds) else [at for at, kind in enumerate(kinds) if kind not in known]
        coded = self._new_codes(text, [kinds[at] for at in strange])
        for place in sorted({*strange, *coded}) if coded else strange:
            kind, line = kinds[place], lines[place]
            if kind in known and place not in coded:
                continue
            self._strange += 1
            if len(known) < MOST_KINDS and len(kind) < LONGEST_KIND:
                known.add(kind)
            mark, _ = _parted(line)
            if place >= read_to.get(mark, 0) and (place in coded or self._is_new(lines, kind, place, mark)):
                start = _start_of(lines, place, mark, read_to.get(mark, 0))
                read_to[mark] = self._hand_on(lines, start, place, mark)
                self._leave()
        self._lines += len(lines) - 1

    def _new_codes(self, text: bytes, strange: list[bytes]) -> set[int]:
        """Return the places of lines with a code that no line gave before in the same words."""
        joined = b"\n".join(strange)
        self._patterns.update(pattern for word, pattern in _CODES.items() if word in joined)
        found = {code for pattern in self._patterns for code in pattern.findall(text)} - self._codes
        if not found or len(self._codes) + len(found) > MOST_CODES:
            return set()
        self._codes |= found
        first: dict[bytes, int] = {}
        for match in chain.from_iterable(pattern.finditer(text) for pattern in self._patterns):
            if match[0] in found:
                first.setdefault(match[0], match.start())
        return {text.count(b"\n", 0, place) for place in first.values()}

    def _is_new(self, lines: list[bytes], kind: bytes, place: int, mark: bytes) -> bool:
        """Return whether a line that differs from all before it reports a failure, and one that others have not."""
        if not any(needle in kind for needle in NEEDLES):
            return _FRAME in lines[place - 1] and bool(place)
        if _FRAME in kind or not (said := _PLACE.search(kind)):
            return True
        name = (mark.translate(None, _DIGITS), said[0])
        self._places[name] += 1
        return self._places[name] <= MOST_OF_A_PLACE

    def _hand_on(self, lines: list[bytes], start: int, place: int, mark: bytes) -> int:
        """Hand on the lines of one process from a start until a line has all that belongs to it; return where."""
        end = before = start
        for end in range(start, min(len(lines) - 1, place + MOST_OF_A_TRACEBACK)):
            line = lines[end]
            whose, wrote = _parted(line)
            if whose != mark:
                continue
            if end > place and _HEADER in line and not any(words in lines[before] for words in _CHAINED):
                return end
            self._taken += 1
            heed = self._take(line, self._lines + end + 1)
            if end >= place and heed != "more":
                break
            before = end if wrote.strip() else before
        return end + 1

    def _feed(self, piece: bytes, *, last: bool) -> None:
        text = self._rest + piece if self._rest else piece
        end = text.rfind(b"\n") + 1
        if not end and len(text) > LONGEST_LINE:
            end = text.rfind(b"\r") + 1 or len(text)
        self._rest = text[end:]
        if end:
            self._search(text[:end], last=last)

    def _needles_in(self, text: bytes) -> list[bytes]:
        """Return those that a line holds which was not there before, digits aside, and keep lines that hold none.

        No needle has a digit, and a log says the same again and again.
        """
        fresh = set(text.translate(None, _DIGITS).split(b"\n")) - self._kinds
        joined = b"\n".join(fresh)
        needles = [needle for needle in NEEDLES if needle in joined]
        if len(self._kinds) < MOST_KINDS:
            self._kinds.update(
                kind for kind in fresh if len(kind) < LONGEST_KIND and not any(needle in kind for needle in needles)
            )
        return needles

    def _search(self, text: bytes, *, last: bool) -> None:
        tail = self._tail[-TAIL_BYTES:] + text[-TAIL_BYTES:]
        whole = len(tail) == len(self._tail) + len(text)
        # Of the first line the beginning may be missing.
        self._tail = tail if whole else tail[tail.find(b"\n") + 1 or len(tail) :]
        needles = self._needles_in(text)
        nearest = [text.find(needle) for needle in needles]
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
            self._taken += 1
            heed = self._take(text[start:end], self._lines)
            self._wants_next = heed == "more"
            if heed != "nothing" and start > quiet:
                self._note_context(text[max(quiet, start - 4_096) : start])
                quiet = end + 1
            position = end + 1
            nearest = [
                found if found < 0 or found >= position else text.find(needle, position)
                for needle, found in zip(needles, nearest, strict=True)
            ]
        if self.is_full:
            self._rest = text[position:] + self._rest
        else:
            self._lines += text.count(b"\n", min(position, len(text)))


def _start_of(lines: list[bytes], place: int, mark: bytes, low: int) -> int:
    """Return where the traceback that a line stands in begins; its own place where it stands in none."""
    for start in range(place, max(low, place - MOST_OF_A_TRACEBACK) - 1, -1):
        whose, wrote = _parted(lines[start])
        if whose == mark and _HEADER in wrote:
            return start
        if whose == mark and start < place and wrote[1:2] != b" ":
            break
    return place


def _parted(line: bytes) -> tuple[bytes, bytes]:
    mark, wrote = cast("re.Match[bytes]", _MARK.match(line)).groups()
    return mark, wrote
