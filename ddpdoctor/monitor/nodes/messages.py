"""What an agent sends the head each second, and what it is answered: packed, bounded, and decoded strictly.

An update holds the streams of the agent's record that changed since the last one that was acknowledged, and of steps
and explicit collectives the new rows. Columns are differences of microseconds by planes of bytes, which zlib makes
small.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, get_type_hints

import msgspec

from ddpdoctor.errors import RecordError
from ddpdoctor.monitor.nodes.meeting import PROTOCOL
from ddpdoctor.record import layout
from ddpdoctor.record.model import CollectiveTrack, RunRecord
from ddpdoctor.record.streams.measured import CallTrack, StepTrack

MOST_BYTES = 8 << 20
"""Of a message as it is sent; who sends a longer one is cut off."""
MOST_UNPACKED_BYTES = 64 << 20
MOST_ROWS = layout.NUMBERED_ROWS
"""Of a rank in one message."""
MOST_RANKS = 65_536
_UNIT_NS = 1_000
_ROUNDED = ("_ns",)
"""Columns whose names end so are sent in microseconds."""
SENT = tuple(
    name
    for name in RunRecord.__struct_fields__
    if name not in ("job", "logs", "step_tracks", "call_tracks", "collectives")
)
"""The streams that are sent as they are, whenever they changed."""
SELDOM = {"gpus": 10, "host_uses": 5, "gauges": 5, "files": 5, "host_reads": 5}
"""Streams that change all the time, and are sent again after so many updates at the soonest."""
Track = StepTrack | CallTrack | CollectiveTrack
_HINTS = get_type_hints(RunRecord)
_ShortText = Annotated[str, msgspec.Meta(max_length=255)]
_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of one rank's track; they take the place of all that it had from the time of the first of them on."""

    rank: Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
    anew: bool = False
    """What was sent before is of another process, or not known to be there."""
    count: Annotated[int, msgspec.Meta(ge=0, le=MOST_ROWS)]
    columns: dict[str, bytes]


_ManyRows = Annotated[tuple[Rows, ...], msgspec.Meta(max_length=MOST_RANKS)]


class JobFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent knows of the job."""

    world_size: Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)] = 0
    ranks_reported: Annotated[tuple[int, ...], msgspec.Meta(max_length=MOST_RANKS)] = ()
    torch_version: _ShortText = ""
    backend: _ShortText = ""
    started_ns: _Number = 0


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """One node's news."""

    protocol: int = PROTOCOL
    session: _ShortText
    """Drawn by each agent when it starts."""
    number: _Number
    host: _ShortText
    sent_at_ns: _Number
    state: Literal["running", "ended", "left"] = "running"
    """``left``: the ranks go on, but nothing more will be told of them."""
    exit_code: int | None = None
    is_quiet: bool = False
    """Some of its ranks have made no step for a while."""
    clock: tuple[int, int, int] | None = None
    """By its exchanges so far: when, by its clock, and between which bounds the head's clock is ahead."""
    job: JobFacts = JobFacts()
    fields: dict[str, bytes] = {}
    steps: _ManyRows = ()
    calls: _ManyRows = ()
    collectives: _ManyRows | None = None
    """What the ranks told of their flight recorders, as a whole; None where that has not changed."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the head says to an update."""

    number: _Number = 0
    received_at_ns: _Number = 0
    sent_at_ns: _Number = 0
    send_all: bool = False
    """It does not have what the update builds on."""
    refused: Annotated[str, msgspec.Meta(max_length=500)] = ""
    host: _ShortText = ""
    verdict: Annotated[str, msgspec.Meta(max_length=2000)] = ""
    """The verdict on all ranks, as it stands."""
    asks: Annotated[tuple[int, ...], msgspec.Meta(max_length=64)] = ()
    """Ranks whose stacks are wanted."""


def pack(message: msgspec.Struct) -> bytes:
    """A message as it is sent."""
    return zlib.compress(msgspec.msgpack.encode(message), 1)


def unpack_update(content: bytes) -> Update:
    """Read an update; raises RecordError for anything else."""
    update: Update = _unpacked(content, _UPDATES)
    return update


def unpack_answer(content: bytes) -> Answer:
    """Read an answer; raises RecordError for anything else."""
    answer: Answer = _unpacked(content, _ANSWERS)
    return answer


def pack_field(record: RunRecord, name: str) -> bytes:
    """One stream of a record."""
    return msgspec.msgpack.encode(getattr(record, name))


def unpack_field(name: str, content: bytes) -> Any:
    """Read a stream; raises RecordError where it is none."""
    decoder = _FIELDS.get(name)
    if decoder is None:
        raise RecordError(f"{name[:40]!r} is no stream of a record")
    try:
        return decoder.decode(content)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RecordError(f"the stream {name} cannot be read: {error}") from error


def pack_rows(track: Track, start: int = 0, *, anew: bool) -> Rows:
    """The rows of a track from one on, and no more than a message holds: the newest."""
    start = max(start, len(track) - MOST_ROWS)
    names = COLUMNS[type(track)]
    return Rows(
        rank=track.rank,
        anew=anew,
        count=len(track) - start,
        columns={name: _packed_column(name, getattr(track, name)[start:]) for name in names},
    )


def unpack_rows(rows: Rows, kind: type[Track]) -> dict[str, array[int]]:
    """The columns of rows; raises RecordError where they are not those of their kind, each as long as it should be."""
    if set(rows.columns) != set(COLUMNS[kind]):
        raise RecordError("rows of other columns than this version's")
    return {name: _unpacked_column(name, rows.columns[name], rows.count) for name in COLUMNS[kind]}


def _columns_of(kind: type[Track]) -> tuple[str, ...]:
    return tuple(name for name in kind.__struct_fields__ if name not in ("rank", "dropped", "kinds"))


COLUMNS: Mapping[type[Any], tuple[str, ...]] = {
    kind: _columns_of(kind) for kind in (StepTrack, CallTrack, CollectiveTrack)
}


def _packed_column(name: str, column: Iterable[int]) -> bytes:
    values = [value // _UNIT_NS for value in column] if name.endswith(_ROUNDED) else list(column)
    differences = array("q", [value - before for value, before in zip(values, [0, *values], strict=False)])
    if not any(differences):
        return b""
    return _planes(differences.tobytes())


def _unpacked_column(name: str, content: bytes, count: int) -> array[int]:
    if not content:
        return array("q", bytes(8 * count))
    if len(content) != 8 * count:
        raise RecordError(f"a column of {len(content)} bytes for {count} rows")
    planes = [content[at * count : (at + 1) * count] for at in range(8)]
    whole = bytearray(8 * count)
    for at, plane in enumerate(planes):
        whole[at::8] = plane
    column, value, unit = array("q"), 0, _UNIT_NS if name.endswith(_ROUNDED) else 1
    for difference in memoryview(whole).cast("q"):
        value += difference
        column.append(-1 if value == -1 else value * unit)
    return column


def _planes(content: bytes) -> bytes:
    return b"".join(content[at::8] for at in range(8))


def _unpacked(content: bytes, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    if len(content) > MOST_BYTES:
        raise RecordError("a message that is too long")
    unpacker = zlib.decompressobj()
    try:
        plain = unpacker.decompress(content, MOST_UNPACKED_BYTES)
        if unpacker.unconsumed_tail or not unpacker.eof:
            raise RecordError("a message that is too long, or cut")
        return decoder.decode(plain)
    except (zlib.error, msgspec.DecodeError, RecursionError, OverflowError) as error:
        raise RecordError(f"a message that cannot be read: {error}") from error


_UPDATES: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Update)
_ANSWERS: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Answer)
_FIELDS: Mapping[str, msgspec.msgpack.Decoder[Any]] = {name: msgspec.msgpack.Decoder(_HINTS[name]) for name in SENT}
