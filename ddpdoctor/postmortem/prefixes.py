"""Takes apart what launchers and collectors write in front of a line: rank, host, time; and removes colours.

A line may carry several prefixes in any order, as ``2026-11-20T20:17:56.123Z stderr F [rank3]:[E1120 20:17:45 …``.
torch 2.5 and 2.6 write the month without a leading zero, as in ``[E131 16:15:16.707598872 ProcessGroupNCCL.cpp:1595]``.
"""

from __future__ import annotations

import re
from datetime import datetime, timezone
from functools import lru_cache

import msgspec

ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_PREFIXES = re.compile(
    r"(?:> ?)*\s*(?i:\[rank[ :]?(?P<rank>\d{1,6})\]):?\s?"
    r"|(?:> ?)+"
    r"|std(?:out|err): ?"
    r"|\[(?:\d+,)?(?P<mpi>\d{1,6})\]<(?:stdout|stderr)>:\s?"
    r"|Exception in device=[A-Z]+:(?P<core>\d{1,6}): (?=[A-Z])"
    r"|\[(?P<role>[A-Za-z_][\w-]*?)(?P<local>\d{1,5})\]:\s?"
    r"|(?P<iso>\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?):?\s(?:std(?:out|err) [FP] )?"
    r"|\[pod/(?P<pod>[\w.-]+)/[\w.-]+\] "
    r"|(?P<syslog>(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)?) "
    r"(?:(?P<syslog_host>[\w.-]+) (?P<program>[\w./-]+\[\d+\]|kernel): )?"
    r"|\([^()\n]{1,80}?\bpid=(?P<ray_pid>\d+)(?:, ip=(?P<ip>[\w.:]+))?\) ?"
)
"""A mark of quotation, a rank, a stream, a task of MPI, a core of torch_xla, a role of torchrun, a time, a pod, syslog,
and an actor of Ray with any name."""
_TASK = re.compile(r" *(?P<task>\d{1,6}): ?")
_HOST = re.compile(r"(?P<host>[A-Za-z][\w.-]*): ?(?!\d+:\d+ \[)")
"""Not what NCCL begins its own lines with: host, process and thread."""
_SERVICE = re.compile(r"(?P<host>[A-Za-z][\w.-]*) +\| ?")
"""Of ``docker compose``."""
_C10D = re.compile(r"\[(?P<level>[IWEF])(?P<month>\d\d?)(?P<day>\d\d) (?P<clock>\d\d:\d\d:\d\d(?:\.\d+)?) ")
_ELASTIC = re.compile(r"(?P<level>[IWEF])(?P<month>\d\d?)(?P<day>\d\d) (?P<clock>\d\d:\d\d:\d\d\.\d+) (?P<pid>\d+) ")
_STAMP = re.compile(r"\b[IWEF](?P<month>\d\d?)(?P<day>\d\d) (?P<clock>\d\d:\d\d:\d\d\.\d+) ")
_OLD_ELASTIC = re.compile(r"\[(?P<iso>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+)\] ")
_ISO = re.compile(r"\d{4}-\d\d-\d\d[T _]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
SAMPLED_LINES = 400
"""Lines by which it is decided whether every line begins with a task number or a host name …"""
_SHARE = 0.8
"""… as so many of them do."""


class Prefixed(msgspec.Struct):
    """A line and what was in front of it."""

    text: str
    rank: int | None = None
    local: int | None = None
    """The rank on its node, which is all that torchrun writes in front of a line."""
    host: str = ""
    time_ns: int = 0
    marked: str = ""
    """Equal for lines of one process; empty where processes cannot be separated."""
    level: str = ""
    """``E``, ``W``, ``I`` or ``F`` where torch's C++ or launcher wrote it."""
    pid: int = 0


class Habit(msgspec.Struct, frozen=True):
    """What every line of a log begins with."""

    task: bool = False
    host: bool = False
    service: bool = False


def habit_of(sample: str) -> Habit:
    """Tell from the beginning of a log whether its lines begin with task numbers (``srun -l``), hosts or services."""
    lines = [line for line in sample.splitlines()[:SAMPLED_LINES] if line.strip()]
    if len(lines) < 3:
        return Habit()
    tasks = sum(_TASK.match(line) is not None for line in lines)
    # srun's own lines have no number, and there may be as many of them as of the tasks'.
    if tasks >= len(lines) / 2:
        return Habit(task=True)
    if sum(_SERVICE.match(line) is not None for line in lines) >= _SHARE * len(lines):
        return Habit(service=True)
    hosts: dict[str, int] = {}
    for line in lines:
        match = _HOST.match(line)
        if match and any(character.isdigit() or character == "-" for character in match["host"]):
            hosts[match["host"]] = hosts.get(match["host"], 0) + 1
    # Words before a colon differ from line to line; names of hosts come back.
    common = sum(count for count in hosts.values() if count > 1)
    return Habit(host=common >= _SHARE * len(lines))


def split(line: str, habit: Habit, year: int = 0) -> Prefixed:
    """Part a line from its prefixes; ``year`` is for time stamps of torch, which have none."""
    if "\x1b" in line:
        line = ANSI.sub("", line)
    # Of a progress bar only what was written last is to be seen.
    text = line.rstrip("\r").rpartition("\r")[2]
    found = Prefixed(text)
    if habit.host and (match := _HOST.match(text)):
        found.host, text = match["host"], text[match.end() :]
    if habit.service and (match := _SERVICE.match(text)):
        found.host = found.marked = match["host"]
        text = text[match.end() :]
    if habit.task and (match := _TASK.match(text)):
        found.rank, text = int(match["task"]), text[match.end() :]
        found.marked = match["task"]
    for _ in range(6):
        match = _PREFIXES.match(text)
        if match is None or not match.end():
            break
        _take(match, found, year)
        text = text[match.end() :]
    if match := _C10D.match(text):
        found.level, found.time_ns = match["level"], found.time_ns or _without_year(match, year)
    elif match := _ELASTIC.match(text):
        found.level, found.time_ns = match["level"], found.time_ns or _without_year(match, year)
        found.pid = int(match["pid"])
    elif match := _OLD_ELASTIC.match(text):
        found.time_ns = found.time_ns or nanoseconds(match["iso"])
    found.text = text.rstrip()
    return found


def _take(match: re.Match[str], found: Prefixed, year: int) -> None:
    if (number := match["rank"] or match["mpi"] or match["core"]) is not None:
        found.rank, found.marked = int(number), f"rank{number}"
    elif match["local"] is not None:
        found.marked = found.marked or f"{match['role']}{match['local']}"
        found.local = int(match["local"])
        found.rank = found.local if found.rank is None else found.rank
    elif match["iso"] is not None:
        found.time_ns = found.time_ns or nanoseconds(match["iso"])
    elif match["pod"] is not None:
        found.host = found.host or match["pod"]
        found.marked = found.marked or match["pod"]
    elif match["syslog"] is not None:
        month = _MONTHS.index(match["syslog"][:3]) + 1
        day, clock = match["syslog"][4:].split(maxsplit=1)
        found.time_ns = found.time_ns or _in_year(year, month, day, clock)
        found.host = match["syslog_host"] or found.host
        found.marked = found.marked or match["program"] or ""
    elif match["ray_pid"] is not None:
        found.pid, found.host = int(match["ray_pid"]), match["ip"] or found.host
        found.marked = found.marked or f"{match['ip']}:{match['ray_pid']}"


_BEFORE_A_FRAME = re.compile(r'(?P<prefix>\s*\S.{0,199}?)  File "[^"]+", line \d+(?:, in |$)')
_CHANGING = re.compile(r"\d+(?:[-:/.,T ]+\d+)+Z?|^[\s\d|:.]+")
"""Clocks, and the numbers of lines: of one process they differ from line to line."""
_RANK = re.compile(r"(?i:(?<![a-z])(?:mpi|global_?)?rank[ =:]{0,2})(?P<rank>\d{1,6})\b")
_MOST_SHAPES = 32


class OtherPrefixes:
    """What stands in front of the lines of one log in a form that nobody here knows.

    A traceback shows it: its frames are known, and what is in front of one is in front of all lines. What is in front
    of its head only is a logger's.
    """

    def __init__(self) -> None:
        self._shapes: dict[str, re.Pattern[str]] = {}

    def strip(self, found: Prefixed) -> None:
        """Take the prefix away, and note whose line it is."""
        if '", line ' in found.text and (match := _BEFORE_A_FRAME.match(found.text)):
            prefix = match["prefix"]
            shape = "".join(r"\d+" if piece.isdecimal() else re.escape(piece) for piece in re.split(r"(\d+)", prefix))
            if len(self._shapes) < _MOST_SHAPES:
                self._shapes.setdefault(shape, re.compile(shape))
        for pattern in self._shapes.values():
            if match := pattern.match(found.text):
                found.text = found.text[match.end() :]
                rank = _RANK.search(match[0])
                if rank and found.rank is None:
                    found.rank = int(rank["rank"])
                found.marked = found.marked or _CHANGING.sub("", match[0])
                return


def last_time(text: str, year: int = 0) -> int:
    """Return the last time stamp in a piece of a log; 0 where there is none."""
    found = list(_ISO.finditer(text))
    if found:
        return nanoseconds(found[-1][0])
    stamps = list(_STAMP.finditer(text))
    return _without_year(stamps[-1], year) if stamps else 0


def first_time(text: str, year: int = 0) -> int:
    """Return the first time stamp in a piece of a log; 0 where there is none."""
    if match := _ISO.search(text):
        return nanoseconds(match[0])
    stamp = _STAMP.search(text)
    return _without_year(stamp, year) if stamp else 0


@lru_cache(maxsize=4096)
def nanoseconds(text: str) -> int:
    """Nanoseconds since the epoch of a time with a date; UTC where it says no zone; 0 where it is none."""
    text = text.replace("_", "T").replace(" ", "T").replace(",", ".")
    zone = re.search(r"(Z|[+-]\d\d:?\d\d)$", text)
    bare = text[: zone.start()] if zone else text
    whole, _, fraction = bare.partition(".")
    try:
        moment = datetime.fromisoformat(whole).replace(tzinfo=timezone.utc)
    except ValueError:
        return 0
    shift = 0
    if zone and zone[0] != "Z":
        sign, digits = (-1 if zone[0][0] == "-" else 1), zone[0][1:].replace(":", "")
        shift = sign * (int(digits[:2]) * 3_600 + int(digits[2:]) * 60)
    return (int(moment.timestamp()) - shift) * 1_000_000_000 + int((fraction + "0" * 9)[:9])


def _without_year(match: re.Match[str], year: int) -> int:
    return _in_year(year, int(match["month"]), match["day"], match["clock"])


def _in_year(year: int, month: int, day: str, clock: str) -> int:
    year = year or datetime.now(timezone.utc).year
    return nanoseconds(f"{year}-{month:02}-{int(day):02}T{clock}")
