"""Puts tracebacks together from the lines of a log in which those of several processes may stand mixed."""

from __future__ import annotations

import re
import textwrap

import msgspec

from ddpdoctor.finding import Frame

HEADER = "Traceback (most recent call last):"
_FRAME = re.compile(r'(?P<margin>\s*?)(?:  )?File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?$')
_RAISED = re.compile(r"(?P<type>[A-Za-z_][\w.]*?(?:<locals>\.\w+)?)(?:: (?P<message>.*)|:?)$")
_EXCEPTION = re.compile(
    r"(?:\w+\.)+[A-Z]\w*$|[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Timeout|Failure|Iteration|Warning|Abort\w*)$"
)
"""Names of exceptions, where no head of a traceback says that one comes, or no message follows."""
_OF_TASK = re.compile(r"ray\.exceptions\.RayTaskError\((?P<type>[A-Za-z_]\w*)\): ray::")
_MARKERS = re.compile(r"\s*[\^~ ]*[\^~][\^~ ]*$")
_REPEATED = re.compile(r"\s*\[Previous line repeated \d+ more times?\]$")
_CHAINED = ("The above exception was the direct cause", "During handling of the above exception")
_GOES_ON = re.compile(
    r"\s*(?:Parameter indices which|Parameters which did|Parameter at index|Original exception|Original reason"
    r"|In addition, you can set|making sure all `forward`|If you already have done|\[\S*gloo/|Original Traceback"
    r"|Collectives differ in|Last error:|ncclSystemError|ncclInternalError|ncclInvalidUsage|ncclUnhandledCudaError"
    r"|ncclRemoteError|socket\w+ ?: |NET/\w+ ?: |Memory on the node \(IP|CUDA kernel errors might"
    r"|\[ERROR\] \S+ \(PID:\d+, Device:|E[A-Z]\d{4}: "  # Of torch_npu, and the codes of CANN below it.
    r"|\[Rank \d+\]|\t\w+: |The actor is dead|terminate called|Exception raised from)"
)
"""Second and later lines of torch's messages."""
LINES_AFTER = 12
"""So many lines after an exception are searched for more of its message."""
LAST_LINES = 3
"""Behind the last frame of a traceback in which the log ends: its line of code, markers, the beginning of a frame."""
MOST_LINES = 4_000
"""A traceback that has not ended after so many lines of its log never will."""
MOST_FRAMES = 400
MOST_STRAYS = 3
MOST_OPEN = 1_024
"""Tracebacks at a time, of different ranks whose lines stand between each other."""
MOST_MESSAGE_LINES = 12
LONGEST_MESSAGE_LINE = 2_000


class Raised(msgspec.Struct, kw_only=True):
    """An exception as in its traceback."""

    marked: str = ""
    line: int = 0
    position: int = 0
    rank: int | None = None
    host: str = ""
    pid: int = 0
    time_ns: int = 0
    type: str = ""
    message: list[str] = []
    frames: list[Frame] = []
    """Outermost first."""
    mixed: bool = False
    ignored: bool = False
    """Python said that it goes on after it."""
    hint: str = ""
    """Its class, where the line above it names that."""
    headless: bool = False
    """The log, or what someone kept of it, begins in the traceback."""
    strays: int = 0
    """Lines of its process that do not belong to it."""
    earlier: Raised | None = None
    """The exception that it was raised for, or while it was handled."""
    expects_code: bool = False
    margin: str | None = None
    """What stands in front of all its lines but, perhaps, the first; None before a frame has come."""
    nested: bool = False
    """Its message passes on the traceback of another process or thread."""
    passes_on: Raised | None = None
    """Whose message it stands in, with its head below the first line."""
    age: int = 0
    width: int = 0
    """Columns after which ``rich`` has wrapped the message; 0 where it did not write it."""
    reach: int = 0
    """Columns of the last line of the message."""

    @property
    def is_where_the_log_ends(self) -> bool:
        """Nothing but the last of its frames and their code follow: no stack that a program printed and went on."""
        return len(self.frames) > 1 and self.age <= LAST_LINES and self.strays <= 1

    @property
    def root(self) -> Raised:
        """The first exception of the chain."""
        return self if self.earlier is None else self.earlier.root

    @property
    def text(self) -> str:
        """The message, all lines that are known of it."""
        return "\n".join(self.message)


class Tracebacks:
    """The tracebacks that are open in one log."""

    def __init__(self) -> None:
        self._open: list[Raised] = []
        """The one that was written to last stands at the end."""
        self._closed: list[Raised] = []
        """Those whose message may continue."""
        self._chained: dict[str, Raised | None] = {}

    @property
    def weight(self) -> int:
        """How many lines' time a line takes: each open traceback is looked at."""
        return len(self._open) // 64

    @property
    def busy(self) -> bool:
        """More lines are needed."""
        return bool(self._open or self._closed)

    def begins(self, text: str) -> bool:
        """Return whether a line begins a traceback."""
        return HEADER in text and not text.lstrip().startswith("Original")

    def begins_within(self, marked: str, text: str) -> bool:
        """Return whether a line is a frame of a traceback whose head is not in the log."""
        if hint_of(text):
            return True
        frame = _FRAME.match(text)
        if frame is None or not (frame["function"] or text.startswith("  File")):
            return False  # Without a function it is where Python could not parse a file.
        return not any(one.marked == marked for one in self._open) and not any(
            one.nested and one.marked == marked for one in self._closed
        )

    def begin(self, raised: Raised, indent: str = "") -> None:
        """Open a traceback; ``indent`` is in front of its head."""
        for other in self._open:
            if other.marked == raised.marked:
                other.mixed = raised.mixed = True
        raised.earlier = self._chained.pop(raised.marked, None)
        if indent and (outer := self._told_in(raised.marked, indent)):
            self._closed.remove(outer)
            raised.passes_on, raised.frames = outer, [*outer.frames]
            raised.line, raised.position, raised.earlier = outer.line, outer.position, outer.earlier
        if raised.hint:
            # What it was passed on in ends with this line.
            self._open = [one for one in self._open if one.marked != raised.marked]
        if len(self._open) >= MOST_OPEN:
            del self._open[0]
        self._open.append(raised)

    def take(self, marked: str, text: str) -> tuple[bool, list[Raised]]:
        """Take in a line; return whether it belonged to a traceback, and which ones are complete now."""
        if text.startswith("**") and text.endswith("**"):
            text = text.strip("*")  # Marked by whoever posted it.
        done = self._aged()
        if self._goes_on(marked, text):
            return True, done
        if text.startswith(_CHAINED):
            earlier = next((one for one in reversed(self._closed) if one.marked == marked), None)
            if earlier is not None:
                self._closed.remove(earlier)
                self._chained[marked] = earlier
                return True, done
        here = [one for one in self._open if one.marked == marked]
        if not here:
            return False, done
        text = text.removeprefix(here[-1].margin or "")
        if frame := _FRAME.match(text):
            self._feed(_choose(here, expects_code=False), frame)
            return True, done
        if _MARKERS.match(text) or _REPEATED.match(text):
            return True, done
        if text.startswith("    ") and not here[-1].nested:
            code = _choose(here, expects_code=True)
            code.expects_code = False
            self._touch(code)
            return True, done
        if not text.startswith((" ", "\t")) and (raised := _RAISED.match(text)):
            ended = _choose(here, expects_code=False)
            told = raised["message"] is not None and not ended.headless
            known = told or _EXCEPTION.match(raised["type"]) is not None
            if (ended.frames or ended.type) and known:
                self._end(ended, raised)
                return True, done
        if here[-1].headless and text.strip():
            # Any stack looks like this, and only an exception behind it makes a traceback of it.
            here[-1].strays += 1
            if here[-1].strays > MOST_STRAYS:
                self._open.remove(here[-1])
        return False, done

    def finish(self, *, goes_on: bool = False) -> list[Raised]:
        """Return what is left at the end of the log, or where it goes on elsewhere: exceptions, and at the end
        tracebacks that were cut off.
        """
        cut = [] if goes_on else self._open
        left = [
            *self._closed,
            *(one.passes_on or one for one in cut if one.frames and (not one.headless or one.is_where_the_log_ends)),
            *(one for one in cut[-1:] if one.hint and not (one.headless or one.frames) and one.age <= LAST_LINES),
            *filter(None, self._chained.values()),
        ]
        self._open, self._closed, self._chained = [], [], {}
        return left

    def _told_in(self, marked: str, indent: str) -> Raised | None:
        """Return the exception in whose message a head stands: it is indented, and those of one logger are alike."""
        last = next((one for one in reversed(self._closed) if one.marked == marked), None)
        return last if last and last.age < LAST_LINES and len(last.margin or "") < len(indent) else None

    def _goes_on(self, marked: str, text: str) -> bool:
        """Add a line to the message of an exception that has just ended."""
        last = next((one for one in reversed(self._closed) if one.marked == marked), None)
        if last is None:
            return False
        if last.nested:
            if frame := _FRAME.match(text):
                self._feed(last, frame)
            elif not text.startswith((" ", "\t")) and _RAISED.match(text) and HEADER not in text:
                last.message.append(text[:LONGEST_MESSAGE_LINE])
                last.nested = False
            elif not text.strip() or HEADER in text:
                last.nested = False
                return False
            return True
        if last.width and last.age == 1 and _is_wrapped(last, text) and len(last.message) < MOST_MESSAGE_LINES:
            last.message[-1] = f"{last.message[-1].rstrip()} {text.strip()}"
            last.reach, last.age = len(text.rstrip()), 0
            return True
        # A list below a colon is indented, and so is the code of other ranks' frames, where no mark parts the ranks.
        lists = last.message[-1].rstrip().endswith(":") or last.message[-1][:1].isspace()
        listed = lists and (last.age == 1 or marked) and text[:1].isspace()
        listed = listed and not any(one.marked == marked for one in self._open)
        told = listed or _GOES_ON.match(text) or last.message[-1].strip() == "Last error:"
        if told and len(last.message) < MOST_MESSAGE_LINES:
            last.message.append(text[:LONGEST_MESSAGE_LINE])
            last.age = 0
            if "Original Traceback" in text:
                last.nested = True
            return True
        return False

    def _feed(self, raised: Raised, frame: re.Match[str]) -> None:
        if len(raised.frames) < MOST_FRAMES:
            file = frame["file"].replace("\\", "/") if frame["file"][1:3] == ":\\" else frame["file"]
            raised.frames.append(Frame(file, int(frame["line"]), frame["function"] or ""))
        if raised.margin is None:  # That of the first: two ranks that write at once indent each other's lines.
            raised.margin = frame["margin"]
        raised.expects_code, raised.age = True, 0
        if raised in self._open:
            self._touch(raised)

    def _touch(self, raised: Raised) -> None:
        self._open.remove(raised)
        self._open.append(raised)

    def _end(self, raised: Raised, match: re.Match[str]) -> None:
        self._open.remove(raised)
        raised.type = match["type"].rpartition(".")[2]
        raised.message = [(match["message"] or "")[:LONGEST_MESSAGE_LINE]]
        raised.reach = len(match[0].rstrip())
        raised.age = 0
        self._closed.append(raised)

    def _aged(self) -> list[Raised]:
        """Give out what nothing more is to come of."""
        if not self.busy:
            return []
        for one in (*self._open, *self._closed):
            one.age += 1
        done = [one for one in self._closed if one.age > (LINES_AFTER if not one.nested else MOST_LINES)]
        given_up = [one for one in self._open if one.age > MOST_LINES]
        self._closed = [one for one in self._closed if one not in done]
        self._open = [one for one in self._open if one not in given_up]
        return done + [one.passes_on or one for one in given_up if one.frames and not one.headless]


def hint_of(text: str) -> str:
    """Return the class of an exception that Ray names above the frames of its task."""
    match = _OF_TASK.search(text) if "RayTaskError(" in text else None
    return match["type"] if match else ""


def parse(text: str) -> Raised | None:
    """Return the last exception of a traceback that stands alone, as in error files of torchelastic; None without."""
    tracebacks = Tracebacks()
    done: list[Raised] = []
    for line in textwrap.dedent(text).splitlines():
        if tracebacks.begins(line):
            tracebacks.begin(Raised())
        else:
            done += tracebacks.take("", line)[1]
    done += tracebacks.finish()
    return done[-1] if done else None


def _is_wrapped(last: Raised, text: str) -> bool:
    """Return whether a line continues with a message because its first word had no place on the line before."""
    words = text.split(maxsplit=1)
    return bool(words) and not text[:1].isspace() and last.reach + 1 + len(words[0]) > last.width >= len(text.rstrip())


def _choose(here: list[Raised], *, expects_code: bool) -> Raised:
    """Return the traceback to which a line belongs: the one written to last, if it waits for such a line."""
    return next((one for one in reversed(here) if one.expects_code == expects_code), here[-1])
