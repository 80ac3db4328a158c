"""Takes lines and tracebacks out of the forms in which collectors, terminals, notebooks and web pages put them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from ddpdoctor.postmortem.prefixes import Habit, Prefixed, nanoseconds, split
from ddpdoctor.postmortem.tracebacks import HEADER

# Takes the text out of lines that a logger or a collector wrote as one JSON object each.

_TEXTS = ("message", "msg", "event", "log", "line", "text", "body", "textPayload", "MESSAGE")
_EXCEPTIONS = ("exc_info", "exc_text", "exception", "traceback", "stack_trace", "stacktrace", "error", "stack")
_TIMES = ("timestamp", "time", "ts", "asctime", "@timestamp")
_RANKS = ("rank", "global_rank", "RANK", "process_index")
_HOSTS = ("host", "hostname", "node", "_HOSTNAME")
_MOST_LINES = 1_000
"""Of one object: of a longer text, such as an endless recursion, the beginning and the end."""
_NESTED = ("record", "extra", "fields", "jsonPayload", "kubernetes")
"""Objects inside of the line whose fields count as well."""


def _of_object(line: str) -> list[Prefixed]:
    """Return the lines of text in a line that is a JSON object, with what the object says of all of them; empty if it
    is none.

    The ``text`` of each still has the prefixes that its writer gave it.
    """
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return []
    if not isinstance(found, dict):
        return []
    fields: dict[str, Any] = {}
    for name in _NESTED:
        inner = found.get(name)
        if isinstance(inner, dict):
            fields |= inner
    fields |= found
    texts = [fields[name] for names in (_TEXTS, _EXCEPTIONS) for name in names if isinstance(fields.get(name), str)]
    rank = next((fields[name] for name in _RANKS if name in fields), None)
    number = int(rank) if isinstance(rank, int) or (isinstance(rank, str) and rank.isdecimal()) else None
    host = next((fields[name] for name in _HOSTS if isinstance(fields.get(name), str)), "")
    stamp = next((fields[name] for name in _TIMES if name in fields), "")
    time_ns = nanoseconds(stamp) if isinstance(stamp, str) else 0
    marked = "" if number is None else f"rank{number}"
    lines = "\n".join(dict.fromkeys(texts)).splitlines()
    if len(lines) > _MOST_LINES:
        lines = lines[: _MOST_LINES // 2] + lines[-_MOST_LINES // 2 :]
    return [Prefixed(text, rank=number, host=host, time_ns=time_ns, marked=marked) for text in lines]


# Takes apart lines that hold several, and strings that hold a traceback.

_RECORD = re.compile(r"(?<!\s)\s{2,}(?=\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)")
"""What stands between records of a logger that a collector has put into one line."""
_JOINED = re.compile(r'File "[^"]+", line \d+, in [\w<>.]+')
_LONGEST_JOINED = 20_000
_CLASS = re.compile(r"(?<![\w.\"'])(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)(?=: | *$)")
_ESCAPED = re.compile(r"(?P<quote>[\"']?)Traceback \(most recent call last\):(?=\\n)")
_PLAIN = re.compile(r"([^\\]*)(?:\\(.))?")
_FIELD = re.compile(
    r'\s+"message": (?P<text>"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): (?:[^"\\]|\\["\\/bfnrt])*"),?\s*$'
)
"""An exception in an object of several lines, as torchelastic prints its error files."""
_ESCAPES = {"n": "\n", "t": "\t"}


def lines_in(line: str, habit: Habit, year: int) -> Sequence[Prefixed]:
    """Return the line without its prefixes; several where it is an object that holds several."""
    outer = _of_object(line) if line.startswith("{") else []
    if not outer:
        if '"message": "' in line and (field := _FIELD.match(line)):
            return [Prefixed(text) for text in msgspec.json.decode(field["text"], type=str).splitlines()]
        if "(most recent call last):\\n" in line and (match := _ESCAPED.search(line)):
            return _escaped(line, match, habit, year)
        if "  20" in line and len(pieces := _RECORD.split(line)) > 2:
            return [split(one, habit, year) for one in pieces]
        if len(line) < _LONGEST_JOINED and line.count('File "') > 1 and (pieces := _unfolded(line)):
            first = split(pieces[0], habit, year)
            return [first, *(replace(first, text=one) for one in pieces[1:])]
        return (split(line, habit, year),)
    inner = [split(one.text, habit, year) for one in outer]
    for one, of_object in zip(inner, outer, strict=True):
        one.rank = of_object.rank if one.rank is None else one.rank
        one.host, one.marked = one.host or of_object.host, one.marked or of_object.marked
        one.time_ns = of_object.time_ns or one.time_ns
    return inner


def _escaped(line: str, match: re.Match[str], habit: Habit, year: int) -> Sequence[Prefixed]:
    """Return the lines of a traceback that stands in a string of its line, as records and error files have it."""
    pieces: list[str] = []
    for plain, escape in _PLAIN.findall(line, match.end()):
        before, quote, _ = plain.partition(match["quote"]) if match["quote"] else (plain, "", "")
        pieces.append(before)
        if quote:
            break
        pieces.append(_ESCAPES.get(escape, escape))
    lines = "".join(pieces).splitlines()[1:]
    first = split(line[: match.end()], habit, year)
    return [first, *(replace(first, text=one) for one in lines[:_MOST_LINES])]


def _unfolded(line: str) -> list[str]:
    """Return the lines of a traceback that were joined to one, as forms on the web do; nothing for others."""
    places = [match.start() for match in _JOINED.finditer(line)]
    if len(places) < 2:
        return []
    pieces = [line[low:high] for low, high in zip(places, [*places[1:], len(line)], strict=True)]
    last = _CLASS.search(pieces[-1])
    if last:
        pieces[-1:] = [pieces[-1][: last.start()], pieces[-1][last.start() :].strip()]
    frames = (_JOINED.match(one) for one in pieces)
    return [line[: places[0]].strip(), *(f"  {f[0]}" if f else one for f, one in zip(frames, pieces, strict=True))]


_SHORTEST_TWICE = 8
"""Characters that two ranks write alike at once; shorter ones, as figures, are found twice in any line."""
_TWICE = re.compile(r"(?=.*[a-z])(?P<one>.{8,200}?)(?P=one)(?:(?P<more>.{4,200}?)(?P=more))?\s*$")


def parts_of(text: str) -> list[str]:
    """Part two ranks' lines that share one, for lack of a line feed between them."""
    if text.find(text[:_SHORTEST_TWICE], _SHORTEST_TWICE) > 0 and (twice := _TWICE.match(text)):
        return [twice["one"] + (twice["more"] or "")] * 2
    if "[rank" not in text[1:] and "Traceback (most recent" not in text:
        return [text]
    starts = [
        match.start() for match in re.finditer(r"(?<=\S)\[rank\d+\]:|(?<=\S)Traceback \(most recent call last\):", text)
    ]
    if not starts:
        return [text]
    return [text[low:high] for low, high in zip([0, *starts], [*starts, len(text)], strict=True)]


# Translates tracebacks in other forms than the interpreter's into its form, line by line.

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


_CELL = re.compile(r"(?P<type>[A-Za-z_]\w*?)(?:\s*Traceback \(most recent call last\)|\s{4,}Traceback \([a-z ]*)$")
_CELL_PLACE = re.compile(r"(?:File )?(?P<file>\S.*?)(?:, line|:)? ?\d*(?:,? in (?P<function>[\w<>.]+)(?:\(.*)?)?$")
_LONGEST_PLACE = 500
_CELL_LINE = re.compile(r"-+> ?(?P<line>\d+)\b")
"""Of a notebook: the head of a traceback, where a frame is, and its line."""


class BoxedTracebacks:
    """The boxes, groups and cells that are open in one log, by the mark of their process."""

    def __init__(self) -> None:
        self._boxes: dict[str, list[str]] = {}
        self._groups: set[str] = set()
        self._cells: dict[str, tuple[str, str, str]] = {}
        """The class of an exception, and the file and the function of its next frame."""
        self.hint = ""
        """The class of the exception whose traceback the line opens, where it names that."""
        self.width = 0
        """Columns of the box that the line opens, 0 where it opens none."""

    def translate(self, marked: str, text: str) -> str | None:
        """Return the line as the interpreter would have written it; None where it would have written none."""
        self.width, self.hint = 0, ""
        if "Traceback" in text and (cell := _CELL.match(text)):
            self._cells[marked] = (cell["type"], "", "")
            self.hint = cell["type"]
            return HEADER
        if marked in self._cells:
            return self._in_cell(marked, text)
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

    def _in_cell(self, marked: str, text: str) -> str | None:
        kind, file, function = self._cells[marked]
        if text.startswith(kind):
            del self._cells[marked]
            return text
        if line := _CELL_LINE.match(text):
            return f'  File "{file}", line {line["line"]}, in {function or "<module>"}'
        if text[:1].strip() and not text[0].isdigit() and (place := _CELL_PLACE.match(text[:_LONGEST_PLACE])):
            self._cells[marked] = (kind, place["file"].strip("<>"), place["function"] or "")
        return None

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
