"""The screens that are shown elsewhere: the head hands them what it shows itself, and takes nothing from them.

A screen asks, and is answered once there is something newer than what it has, or after a while with nothing; so a slow
one gets fewer snapshots, one that is gone none, and nothing piles up for either. However many there are, and however
often they ask, a snapshot is packed once, and no more of them than cost a small share of a core.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from itertools import chain, islice

import msgspec

from ddpdoctor.errors import RecordError
from ddpdoctor.files.untrusted import line_of
from ddpdoctor.finding import Finding
from ddpdoctor.monitor.nodes.messages import OtherVersion, Picture, Request, Shown, decoded, pack_answer, unpacked
from ddpdoctor.monitor.snapshot import Snapshot

# The source lines that are shown with a snapshot, for a screen elsewhere: it has other files, or none.

MOST_LINES = 2_000
LONGEST_LINE = 500
LINES_OF_A_PLACE = 12
FRAMES_OF_A_STACK = 40
"""As many as a report shows at most."""


def lines_shown(snapshot: Snapshot) -> dict[str, dict[int, str]]:
    """Return the lines that a screen or a report of it may show, by file and number, as they are in the files of this
    machine.

    What the other nodes say names these files, so none is read but Python's.
    """
    found: dict[str, dict[int, str]] = {}
    for file, line in islice(dict.fromkeys(_places(snapshot)), MOST_LINES):
        text = line_of(file, line) if file.endswith(".py") else ""
        if text:
            found.setdefault(file, {})[line] = text[:LONGEST_LINE]
    return found


def _places(snapshot: Snapshot) -> Iterator[tuple[str, int]]:
    """Yield where these lines are; what matters most comes first."""
    sides = () if snapshot.stall is None else snapshot.stall.sides
    findings = [view.finding for view in snapshot.findings]
    if snapshot.cause is not None:
        findings.insert(0, snapshot.cause)
    stacks = (
        *(side.stack for side in sides),
        *(fact.stack for finding in findings for fact in finding.evidence),
        *(rank.stack for rank in snapshot.ranks),
    )
    yield from chain.from_iterable(map(_lines_of_place, findings))
    for stack in stacks:
        for frame in stack[:FRAMES_OF_A_STACK]:
            yield frame.file, frame.line


def _lines_of_place(finding: Finding) -> Iterator[tuple[str, int]]:
    place = finding.location
    if place is not None:
        last = min(max(place.line, place.end_line), place.line + LINES_OF_A_PLACE - 1)
        for number in range(place.line, last + 1):
            yield place.file, number


MOST_SNAPSHOT_BYTES = 24 << 20
"""Packed; one of 4,096 ranks has less than a third of it. Whoever listens in the place of a head can have a screen hold
as much."""
MOST_UNPACKED_BYTES = 512 << 20
MOST_REQUEST_BYTES = 4_096
MOST_SCREENS = 16
FORGOTTEN_AFTER_S = 10.0
"""Screens ask again as soon as they are answered, which is every two seconds at the latest."""
NOTHING_NEW_AFTER_S = 2.0
UNDER_WAY_S = 60.0
"""A snapshot that was sent on a connection and is asked for again there is under way for so long: over a slow link a
megabyte takes a while, and more of them would never end."""
ANSWERED_EVERY_S = 0.25
REQUESTS_PER_S = 200
"""Of all screens together; who asks more often than all of them need waits, and with it no one else for long."""
PACKING_SHARE = 0.05
"""Of a core."""


def unpack_request(content: bytes) -> Request:
    """Read what a screen asks for; raises RecordError, of which OtherVersion is one."""
    if len(content) > MOST_REQUEST_BYTES:
        raise RecordError("a request that is too long")
    return decoded(content, _REQUESTS, MOST_REQUEST_BYTES)


def unpack_shown(parts: list[bytes]) -> tuple[Shown, Picture | None]:
    """Read an answer to a screen; raises RecordError for anything else."""
    if not 1 <= len(parts) <= 2:
        raise RecordError("an answer with too many parts")
    try:
        shown = _SHOWN.decode(parts[0])
        if len(parts) == 1:
            return shown, None
        return shown, _PICTURES.decode(unpacked(parts[1], MOST_UNPACKED_BYTES))
    except (msgspec.DecodeError, RecursionError, OverflowError) as error:
        raise RecordError(f"an answer that cannot be read: {error}") from error


class _Screen:
    """One that has asked."""

    def __init__(self) -> None:
        self.asked_s = self.answered_s = 0.0
        self.request: Request | None = None
        """Not answered yet."""
        self.sent_ns = 0
        """Time of the snapshot that was sent to it last, …"""
        self.sent_s = 0.0
        """… and when."""

    def has_under_way(self, request: Request, now_s: float) -> bool:
        """Return whether it asks for what was sent to it already; one that connects anew is another screen."""
        return request.has_ns < self.sent_ns and now_s - self.sent_s < UNDER_WAY_S


class Screens:
    """Used by the thread of the head alone, but for ``offer``."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._screens: dict[bytes, _Screen] = {}
        self._newest: Snapshot | None = None
        self._packed_ns = 0
        self._packed = b""
        self._pack_at_s = 0.0
        self._allowed = float(REQUESTS_PER_S)
        self._counted_s = 0.0
        self.others = ""
        """Why a screen was refused for its version, as a sentence; empty where none was."""

    def offer(self, snapshot: Snapshot) -> None:
        """Have a snapshot shown; a newer one takes its place."""
        self._newest = snapshot

    def take(self, screen: bytes, parts: list[bytes], now_s: float) -> bytes | None:
        """Take in a request; what is to be answered at once, None for nothing. Raises RecordError for what is none.

        Who asks first is greeted, and knows by that that the key is right, however long a snapshot takes.
        """
        if len(parts) != 1:
            raise RecordError("a request with several parts")
        try:
            request = unpack_request(parts[0])
        except OtherVersion as other:
            self.others = f"a screen on {other.host} runs another version of ddpdoctor and is not served"
            return pack_answer(Shown(number=other.number, host=self._host, refused=other.reason))
        for known, held in list(self._screens.items()):
            if now_s - held.asked_s > FORGOTTEN_AFTER_S:
                del self._screens[known]
        if screen not in self._screens and len(self._screens) >= MOST_SCREENS:
            reason = f"{MOST_SCREENS} screens are attached already"
            return pack_answer(Shown(number=request.number, host=self._host, refused=reason))
        is_new = screen not in self._screens
        held = self._screens.setdefault(screen, _Screen())
        held.asked_s, held.request = now_s, request
        return pack_answer(Shown(host=self._host)) if is_new else None

    def is_flooded(self, now_s: float) -> bool:
        """Count a request; whether there were too many of late."""
        refill = (now_s - self._counted_s) * REQUESTS_PER_S
        self._allowed = max(-1.0, min(float(REQUESTS_PER_S), self._allowed + refill) - 1)
        self._counted_s = now_s
        return self._allowed < 0

    def due(self, now_s: float) -> Iterator[tuple[bytes, list[bytes]]]:
        """Yield what each screen that has asked is to be answered now."""
        for screen, held in self._screens.items():
            request = held.request
            if request is None or now_s - held.answered_s < ANSWERED_EVERY_S:
                continue
            content = self._content(now_s)
            has_newest = not content or request.has_ns == self._packed_ns or held.has_under_way(request, now_s)
            if has_newest and now_s - held.asked_s < NOTHING_NEW_AFTER_S:
                continue
            held.request, held.answered_s = None, now_s
            if not has_newest:
                held.sent_ns, held.sent_s = self._packed_ns, now_s
            answer = pack_answer(Shown(number=request.number, host=self._host))
            yield screen, [answer] if has_newest else [answer, content]

    @property
    def have_the_last(self) -> bool:
        """All who look on have the newest snapshot, as what they ask for says."""
        requests = [held.request for held in self._screens.values()]
        return all(request is not None and request.has_ns == self._packed_ns for request in requests)

    def last_messages(self) -> Iterator[tuple[bytes, list[bytes]]]:
        """Yield the last message to each screen, whether it has requested one or was just answered."""
        self._pack_at_s = 0.0
        content = self._content(0.0)
        for screen, held in self._screens.items():
            answer = pack_answer(
                Shown(number=held.request.number if held.request else 0, host=self._host, has_left=True)
            )
            yield screen, [answer, content] if held.sent_ns != self._packed_ns else [answer]

    def _content(self, now_s: float) -> bytes:
        """Return the newest snapshot as it is sent, or the one before where packing has had its share for now."""
        newest = self._newest
        if newest is not None and newest.now_ns != self._packed_ns and now_s >= self._pack_at_s:
            began_s = time.thread_time()
            picture = Picture(snapshot=newest, lines=lines_shown(newest))
            content = zlib.compress(msgspec.msgpack.encode(picture), 1)
            self._pack_at_s = now_s + (time.thread_time() - began_s) / PACKING_SHARE
            self._packed, self._packed_ns = content, newest.now_ns
        return self._packed


_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_SHOWN: msgspec.msgpack.Decoder[Shown] = msgspec.msgpack.Decoder(Shown)
_PICTURES: msgspec.msgpack.Decoder[Picture] = msgspec.msgpack.Decoder(Picture)
