"""Translates tracebacks in other forms than the interpreter's into its form, line by line.

The boxes of ``rich`` (accelerate, Lightning and many scripts install it), and exception groups.
"""

from __future__ import annotations

import re

from ddpdoctor.postmortem.tracebacks import HEADER

_BOX = re.compile(
    r"[\u256d\u250c+][\u2500\u2501-]+ Traceback \(most recent call last\) [\u2500\u2501-]+[\u256e\u2510+]"
)
_BOTTOM = re.compile(r"\s*[\u2570\u2514+][\u2500\u2501-]+[\u256f\u2518+]\s*$")
_SIDE = "\u2502|"
_PLACE = re.compile(r"(?P<file>[^\s:]\S*?):(?P<line>\d+)\s+in\s+(?P<function>\S+)$")
_CODE = re.compile(r"(?:[\u2771>] )?\s*\d+ [\u2502|]")
_GROUP = "Exception Group Traceback (most recent call last):"
_IN_GROUP = re.compile(r"\s+\| ?(?P<text>.*)")
_OF_GROUP = re.compile(r"\s+\+[-+]*(?: \d+ |\.\.\. )?-*\s*$")
MOST_WRAPPED = 8
"""Lines over which a long path and the name of its function are wrapped."""


class BoxedTracebacks:
    """The boxes and groups that are open in one log, by the mark of their process."""

    def __init__(self) -> None:
        self._boxes: dict[str, list[str]] = {}
        self._groups: set[str] = set()
        self.width = 0
        """Columns of the box that the line opens, 0 where it opens none."""

    def translate(self, marked: str, text: str) -> str | None:
        """Return the line as the interpreter would have written it; None where it would have written none."""
        self.width = 0
        if "Traceback" in text and (box := _BOX.search(text)):
            self._boxes[marked] = []
            self.width = len(box[0])
            return HEADER
        if marked in self._boxes:
            return self._in_box(marked, text)
        if _GROUP in text:
            self._groups.add(marked)
            return HEADER
        if marked in self._groups:
            if _OF_GROUP.match(text):
                return None
            if inner := _IN_GROUP.match(text):
                return inner["text"]
            self._groups.discard(marked)
        return text

    def _in_box(self, marked: str, text: str) -> str | None:
        if _BOTTOM.match(text):
            del self._boxes[marked]
            return None
        stripped = text.strip()
        if not stripped or stripped[0] not in _SIDE:
            # Cut off: what follows is no part of the box.
            del self._boxes[marked]
            return text
        inner = stripped.strip(_SIDE).strip()
        pieces = self._boxes[marked]
        if not inner or _CODE.match(inner) or inner[0] in "\u256d\u2502\u2570+|":
            pieces.clear()
            return None
        pieces[:] = [*pieces[1 - MOST_WRAPPED :], inner]
        # A long path is wrapped; above it may stand something else.
        for start in range(len(pieces)):
            for joint in ("", " "):
                if place := _PLACE.match(joint.join(pieces[start:])):
                    pieces.clear()
                    return f'  File "{place["file"]}", line {place["line"]}, in {place["function"]}'
        return None
