"""The user's line that the training thread has stood at for a while, though what it calls there goes on."""

from __future__ import annotations

from types import FrameType
from typing import Optional

from ...user_code import UserCode

STANDS_AFTER_NS = 500_000_000


class StandingLine:
    """The user's frames from one look to the next."""

    def __init__(self, user_code: UserCode) -> None:
        self._user_code = user_code
        self._known: list[tuple[tuple[int, int], int]] = []
        """Code and instruction of each frame, outermost first, and since when it and those around it stand there."""

    def look(self, frame: Optional[FrameType], moved_ns: int, now_ns: int) -> Optional[FrameType]:
        """Return the innermost of the user's frames that has stood for a while; None if it did before ``moved_ns``.

        So an evaluation is located at the line that calls it, and a loop that makes steps nowhere.
        """
        frames = []
        while frame is not None:
            if self._user_code.holds(frame.f_code.co_filename):
                frames.append(frame)
            frame = frame.f_back
        frames.reverse()
        before, self._known = self._known, []
        stands, found = True, None
        for number, own in enumerate(frames):
            place = (id(own.f_code), own.f_lasti)
            stands = stands and number < len(before) and before[number][0] == place
            since_ns = before[number][1] if stands else now_ns
            self._known.append((place, since_ns))
            if now_ns - since_ns >= STANDS_AFTER_NS:
                found = own if since_ns >= moved_ns else None
        return found
