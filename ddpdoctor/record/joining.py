"""Makes one record of the records of several nodes, each with its own numbers for lines and groups and its own clock.

Nothing is judged here. The ranks are numbered alike everywhere; call chains, signatures and groups get the joined
record's numbers, which never change while a job is watched; times are moved to the clock of the first node.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import msgspec

from ddpdoctor.record.model import RunRecord, Site, StreamState
from ddpdoctor.record.streams.collectives import Group, Signature

if TYPE_CHECKING:
    from ddpdoctor.record.model import RankException

# The line of an exception's message that says what is wrong.

_PASSED_ON = re.compile(r"\ACaught (?P<type>\w+) (?P<where>in [^\n]*?)\.?\nOriginal Traceback")
"""How torch raises again what a loader's worker, or a replica's thread, has raised."""
_FRAME = re.compile(r'^ +File "(?P<file>[^"\n<]+)", line (?P<line>\d+)', re.MULTILINE)
_OF_CANN = re.compile(r"^E[A-Z]\d{4}: .+", re.MULTILINE)
"""The runtime of Ascend numbers its errors, below torch's words for the call."""
_LIBRARIES = ("site-packages", "dist-packages", "/lib/python")


def headline(raised: RankException) -> str:
    """Return the first line of its message, with the first of a list below it, or what CANN says of its error; of one
    that a worker passed on, what the worker said and where.
    """
    message = raised.message.strip()
    passed_on = _PASSED_ON.match(message)
    if passed_on is not None:
        # Under the worker's traceback its message stands behind the name of the exception.
        lines = re.findall(rf"^(?:[\w.]+\.)?{passed_on['type']}: ([^\n]+)$", message, re.MULTILINE)
        if lines and (said := lines[-1].strip()):
            return f"{said} ({_origin(message)}{passed_on['where']})"
    first, _, below = message.partition("\n")
    if coded := _OF_CANN.search(below):
        return f"{first.removeprefix('[ERROR] ')}: {coded[0]}"
    return f"{first} {below.strip().partition(chr(10))[0]}" if first.endswith(":") and below else first


def _origin(message: str) -> str:
    """Return the innermost line outside of installed libraries, as ``data.py:21 ``."""
    frames = [frame for frame in _FRAME.finditer(message) if not any(part in frame["file"] for part in _LIBRARIES)]
    return f"{PurePath(frames[-1]['file']).name}:{frames[-1]['line']} " if frames else ""


SITES = frozenset({"site", "sampler_site", "forward_site", "backward_site", "other_site"})
"""Fields that hold a number of ``RunRecord.sites``."""
TIMES = frozenset({"time_ns", "started_ns", "ended_ns", "completed_ns", "sleeps_until_ns", "phase_since_ns"})
"""Fields that hold a moment, beside all whose name ends with ``_at_ns``; other times are durations."""
_TABLES = frozenset({"job", "sites", "signatures", "groups", "streams", "nodes", "logs", "restart", "other_starts"})
"""What is joined in a way of its own."""


class Clock(msgspec.Struct, frozen=True, kw_only=True):
    """How a node's clock differs from that of the first one."""

    offset_ns: int = 0
    """What is added to a time of the node …"""
    at_ns: int = 0
    """… at this time of its own, …"""
    drift: float = 0.0
    """… and so much more for each nanosecond after that."""
    error_ns: int | None = None
    """The offset is wrong by no more; None where it is not known."""

    def moved(self, time_ns: int) -> int:
        """Return a time of the node on the clock of the first one; what is 0 or less is no time, and stays."""
        if time_ns <= 0:
            return time_ns
        return time_ns + self.offset_ns + (int((time_ns - self.at_ns) * self.drift) if self.drift else 0)

    def moved_column(self, times_ns: array[int]) -> array[int]:
        """Each of them moved."""
        offset_ns = self.offset_ns
        if self.drift:
            return array("q", map(self.moved, times_ns))
        return array("q", [time_ns + offset_ns if time_ns > 0 else time_ns for time_ns in times_ns])


class NodePart(msgspec.Struct, frozen=True, kw_only=True):
    """What one node recorded of its ranks."""

    name: str
    """Tells it from the others for as long as they are joined."""
    record: RunRecord
    clock: Clock = Clock()


class Joiner:
    """Joins records again and again, and keeps the numbers that it has given."""

    def __init__(self) -> None:
        self._sites: dict[Site, int] = {}
        self._signatures: dict[Signature, int] = {}
        self._groups: dict[Group, int] = {}
        self._moved: dict[tuple[str, str], tuple[object, Clock, tuple[Any, ...]]] = {}
        """Streams of a node as they were, and what they became: most do not change from look to look."""

    def join(self, parts: Sequence[NodePart]) -> RunRecord:
        """Return the record of all nodes with the job of the first part; of a rank on two nodes the newer stays."""
        first = parts[0].record
        names = {part.name for part in parts}
        self._moved = {key: known for key, known in self._moved.items() if key[0] in names}
        owners = _owners(parts)
        streams: dict[str, list[Any]] = {name: [] for name in RunRecord.__struct_fields__ if name not in _TABLES}
        for part in parts:
            numbers = {
                "site": _numbered(part.record.sites, self._sites),
                "signature": _numbered(part.record.signatures, self._signatures),
                "group": _numbered(part.record.groups, self._groups),
            }
            lost = {rank.rank for rank in part.record.ranks if owners[rank.rank] != part.name}
            for name, rows in streams.items():
                found = self._stream(part, name, numbers)
                rows += [row for row in found if getattr(row, "rank", None) not in lost] if lost else found
        for name in ("ranks", "collectives", "step_tracks", "call_tracks", "heartbeats", "host_uses"):
            streams[name].sort(key=lambda row: row.rank)
        return RunRecord(
            job=msgspec.structs.replace(
                first.job,
                world_size=max(part.record.job.world_size for part in parts),
                ranks_expected=max(part.record.job.ranks_expected for part in parts),
                ranks_reported=tuple(sorted({rank for part in parts for rank in part.record.job.ranks_reported})),
            ),
            sites=tuple(self._sites),
            signatures=tuple(self._signatures),
            groups=tuple(self._groups),
            streams=_states(parts),
            nodes=tuple(
                msgspec.structs.replace(node, clock_error_ns=part.clock.error_ns)
                for part in parts
                for node in part.record.nodes
            ),
            logs=first.logs,
            **{name: tuple(rows) for name, rows in streams.items()},
        )

    def _stream(self, part: NodePart, name: str, numbers: Mapping[str, list[int]]) -> tuple[Any, ...]:
        rows: tuple[Any, ...] = getattr(part.record, name)
        if not rows:
            return rows
        known = self._moved.get((part.name, name))
        if known is None or known[0] is not rows or known[1] != part.clock:
            moved = tuple(_moved(row, numbers, part.clock) for row in rows)
            known = self._moved[part.name, name] = rows, part.clock, moved
        return known[2]


def _numbered(entries: Iterable[Any], table: dict[Any, int]) -> list[int]:
    """Return the joined record's number of each entry; the last one stands for what has none."""
    return [*(table.setdefault(entry, len(table)) for entry in entries), -1]


@cache
def _kinds(names: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return which fields of a kind of rows may have to be changed: the table that they are numbered by, ``time`` for
    moments, empty for what may hold rows itself.
    """
    found = dict.fromkeys(names, "") | {name: name for name in ("signature", "group") if name in names}
    found |= {name: "time" for name in names if name in TIMES or name.endswith("_at_ns")}
    return tuple((found | {name: "site" for name in names if name in SITES}).items())


def _moved(row: Any, numbers: Mapping[str, list[int]], clock: Clock) -> Any:
    """Return a row with the joined record's numbers, and on its clock."""
    changed: dict[str, Any] = {}
    for name, kind in _kinds(row.__struct_fields__):
        value = getattr(row, name)
        if kind == "time":
            if clock.offset_ns and isinstance(value, array):
                changed[name] = clock.moved_column(value)
            elif clock.offset_ns and isinstance(value, int):
                changed[name] = clock.moved(value)
        elif kind and isinstance(value, (int, array)):
            table = numbers[kind]
            changed[name] = _renumbered(table, value) if isinstance(value, array) else _at(table, value)
        elif isinstance(value, tuple) and value and isinstance(value[0], msgspec.Struct):
            changed[name] = tuple(_moved(inner, numbers, clock) for inner in value)
    return msgspec.structs.replace(row, **changed) if changed else row


def _renumbered(table: list[int], numbers: array[int]) -> array[int]:
    """Each of them; with thousands of ranks these are millions."""
    if numbers and min(numbers) >= -1 and max(numbers) < len(table):
        return array("q", map(table.__getitem__, numbers))
    return array("q", [_at(table, number) for number in numbers])


def _at(table: list[int], number: int) -> int:
    return table[number] if 0 <= number < len(table) else -1


def _owners(parts: Sequence[NodePart]) -> dict[int, str]:
    """Return the node of each rank: where it beat last, for ranks may be started again elsewhere."""
    owners: dict[int, tuple[int, str]] = {}
    for part in parts:
        beats = {heartbeat.rank: part.clock.moved(heartbeat.beat_at_ns) for heartbeat in part.record.heartbeats}
        for rank in part.record.ranks:
            beat_ns = beats.get(rank.rank, 0)
            if rank.rank not in owners or beat_ns > owners[rank.rank][0]:
                owners[rank.rank] = beat_ns, part.name
    return {rank: name for rank, (_, name) in owners.items()}


def _states(parts: Sequence[NodePart]) -> dict[str, StreamState]:
    """A stream is as complete as on the node where it is least so; absent only where every node lacks it."""
    joined: dict[str, StreamState] = {}
    for name in dict.fromkeys(name for part in parts for name in part.record.streams):
        states = [part.record.stream(name) for part in parts]
        worst = next((state for state in states if state.state != "complete"), states[0])
        if worst.state == "absent" and any(state.state != "absent" for state in states):
            worst = StreamState("truncated", worst.reason)
        joined[name] = worst
    return joined
